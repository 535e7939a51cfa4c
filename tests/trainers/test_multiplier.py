"""Each kind of multiplier against a recursion worked out by hand, or torch's own Adam."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from envs.errors import UserError
from trainers.multiplier import Multiplier, MultiplierConfig


def run(violations: list[float], **settings) -> list[float]:
    multiplier = Multiplier(MultiplierConfig(**settings))
    return [multiplier.update(v) for v in violations]


def test_gradient_ascent() -> None:
    # 0.1 + 0.5 x 0.4 = 0.3; - 0.5 x 0.2 = 0.2; - 0.5 x 1 < 0, so 0; + 0.5 x 3 = 1.5; + 0.5 x 9 > 2, so 2
    expected = [0.3, 0.2, 0.0, 1.5, 2.0]
    got = run([0.4, -0.2, -1.0, 3.0, 9.0], kind="gradient", init=0.1, lr=0.5, max=2.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_pid_by_hand() -> None:
    # lambda = 2 e + 0.5 I + 4 max(0, e - e_previous), I >= 0 accumulates e.
    #   e:  0.5   I: 0.5   rise: 0.5   2 x 0.5 + 0.25 + 2           =  3.25
    #   e:  0.3   I: 0.8   rise: 0     0.6 + 0.4                    =  1.0
    #   e: -1.0   I: 0     rise: 0     -2                     -> 0
    #   e: -0.2   I: 0     rise: 0.8   -0.4 + 3.2                   =  2.8
    #   e:  0.1   I: 0.1   rise: 0.3   0.2 + 0.05 + 1.2             =  1.45
    got = run([0.5, 0.3, -1.0, -0.2, 0.1], kind="pid", kp=2.0, ki=0.5, kd=4.0)
    np.testing.assert_allclose(got, [3.25, 1.0, 0.0, 2.8, 1.45], rtol=0, atol=1e-12)


def test_pid_with_the_integral_alone_is_gradient_ascent() -> None:
    violations = np.random.default_rng(0).standard_normal(50).tolist()
    np.testing.assert_allclose(
        run(violations, kind="pid", kp=0.0, ki=0.3, kd=0.0),
        run(violations, kind="gradient", init=0.0, lr=0.3),
        rtol=0,
        atol=1e-12,
    )


def test_adam_is_torch_s() -> None:
    violations = np.random.default_rng(1).normal(0, 0.3, 200) + np.sin(np.arange(200) / 15)
    value = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    optimizer = torch.optim.Adam([value], lr=0.05)
    expected = []
    for v in violations:
        optimizer.zero_grad()
        (-value * v).backward()  # ascent on lambda x violation
        optimizer.step()
        with torch.no_grad():
            value.clamp_(0.0, 1.1)
        expected.append(value.item())
    assert min(expected) == 0.0
    assert max(expected) == 1.1
    got = run(violations.tolist(), kind="adam", init=0.7, lr=0.05, max=1.1)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_adam_s_first_step_is_the_learning_rate() -> None:
    assert run([1e-3], kind="adam", init=0.5, lr=0.05)[0] == pytest.approx(0.55, abs=1e-6)
    assert run([-7.0], kind="adam", init=0.5, lr=0.05)[0] == pytest.approx(0.45, abs=1e-6)


@pytest.mark.parametrize("kind", ["gradient", "adam", "pid"])
def test_never_negative_and_never_over_the_limit(kind: str) -> None:
    values = run(np.random.default_rng(2).normal(0, 3, 500).tolist(), kind=kind, lr=0.5, max=2.5)
    assert min(values) == 0.0
    assert max(values) == 2.5


@pytest.mark.parametrize("kind", ["gradient", "adam", "pid"])
def test_the_sign_of_a_steady_violation_decides(kind: str) -> None:
    over = run([0.2] * 20, kind=kind, init=0.0)
    assert (np.diff(over) > 0).all()
    under = run([-0.2] * 200, kind=kind, init=1.0)
    assert (np.diff(under) <= 0).all()
    assert under[-1] == 0.0


@pytest.mark.parametrize("kind", ["gradient", "adam", "pid"])
def test_a_restored_multiplier_goes_on_to_the_last_bit(kind: str) -> None:
    violations = np.random.default_rng(3).standard_normal(40).tolist()
    config = MultiplierConfig(kind=kind, kd=0.5)
    whole = [v for m in [Multiplier(config)] for v in map(m.update, violations)]
    first, second = Multiplier(config), Multiplier(config)
    for v in violations[:17]:
        first.update(v)
    second.load_state_dict(first.state_dict())
    first.update(9.0)  # the copy does not follow the original
    assert [second.update(v) for v in violations[17:]] == whole[17:]


@pytest.mark.parametrize("violation", [math.nan, math.inf, -math.inf])
def test_a_violation_that_is_no_number_is_refused_and_moves_nothing(violation: float) -> None:
    multiplier = Multiplier(MultiplierConfig())
    before = multiplier.state_dict()
    with pytest.raises(UserError, match="violation is not a finite number") as caught:
        multiplier.update(violation)
    assert str(violation) in str(caught.value)
    assert multiplier.state_dict() == before


@pytest.mark.parametrize("name", ["init", "lr", "max", "kp", "ki", "kd"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"multiplier\.{name}"):
        MultiplierConfig(**{name: value})


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="gradient, adam, pid"):
        MultiplierConfig(kind="sgd")
