"""RunningMeanStd against NumPy over all rows at once."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.normalize import RunningMeanStd


def test_by_hand() -> None:
    running = RunningMeanStd(1)
    running.update(np.array([[1.0], [3.0]]))  # mean 2, variance 1
    running.update(np.array([[8.0]]))
    # 1, 3, 8: mean 4, variance (9 + 1 + 16) / 3
    assert running.mean[0] == pytest.approx(4.0, rel=1e-12)
    assert running.var[0] == pytest.approx(26 / 3, rel=1e-12)
    assert running.count == 3


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_equals_numpy_over_the_concatenation(scale: float) -> None:
    rng = np.random.default_rng(0)
    batches = [
        rng.normal(scale * k, scale * (1 + k), size=(*shape, 3))
        for k, shape in enumerate([(1,), (7,), (20, 4), (2, 3, 5), (0,), (500,)])
    ]
    running = RunningMeanStd(3)
    for batch in batches:
        running.update(batch)
    rows = np.concatenate([b.reshape(-1, 3) for b in batches])
    np.testing.assert_allclose(running.mean, rows.mean(0), rtol=1e-10)
    np.testing.assert_allclose(running.var, rows.var(0), rtol=1e-10)
    np.testing.assert_allclose(running.std, np.sqrt(rows.var(0) + 1e-8), rtol=1e-10)
    assert running.count == len(rows)


def test_many_float32_rows_far_from_zero() -> None:
    rows = np.random.default_rng(1).normal(1000.0, 0.01, (20_000, 1)).astype(np.float32)
    running = RunningMeanStd(1)
    for part in np.array_split(rows, 37):
        running.update(part)
    np.testing.assert_allclose(running.var, rows.astype(np.float64).var(0), rtol=1e-6)


def test_before_the_first_row() -> None:
    running = RunningMeanStd(2)
    running.update(np.zeros((0, 2)))
    np.testing.assert_array_equal(running.mean, [0, 0])
    np.testing.assert_allclose(running.std, [1, 1], atol=1e-8)


def test_a_constant_column_has_a_deviation_to_divide_by() -> None:
    running = RunningMeanStd(1)
    running.update(np.full((10, 1), 3.0))
    running.update(np.full((10, 1), 3.0))
    assert running.std[0] == pytest.approx(1e-4, rel=1e-9)


def test_a_restored_one_goes_on_to_the_last_bit_and_alone() -> None:
    rng = np.random.default_rng(2)
    first, second = RunningMeanStd(3), RunningMeanStd(3)
    first.update(rng.random((5, 3)))
    state = first.state_dict()
    kept = {k: np.copy(v) for k, v in state.items()}
    second.load_state_dict(state)
    batch = rng.random((4, 3))
    first.update(batch)
    for name, value in kept.items():
        np.testing.assert_array_equal(state[name], value)  # a checkpoint under way does not change
        np.testing.assert_array_equal(second.state_dict()[name], value)
    second.update(batch)
    for name, value in first.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[name], value)
