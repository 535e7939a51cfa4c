"""`fit` against hand recursion and closed forms; what it does to a run, and its resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from envs.errors import UserError
from trainers.fit import fit
from trainers.metrics import read_metrics
from trainers.run import Run, RunConfig


class Scalar(torch.nn.Module):
    """One weight w."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(w, dtype=torch.float64))


def half_square(module: Scalar, target: float) -> torch.Tensor:
    """(w - target)^2 / 2, whose gradient is w - target."""
    return (module.w - target) ** 2 / 2


def descent(module: Scalar, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def test_it_walks_as_gradient_descent_does_by_hand() -> None:
    module = Scalar()
    targets = [1.0, -2.0, 4.0]
    state = fit(
        module, lambda s: targets[s], half_square, descent(module, 0.5), steps=3, max_grad_norm=None
    )  # fmt: skip
    # 0 -> 0.5 -> -0.75 -> 1.625; the last loss is (-0.75 - 4)^2 / 2
    assert module.w.item() == 1.625
    assert (state.step, state.loss, state.stopped) == (3, 11.28125, "")


def test_the_gradient_is_cut_to_its_norm_and_the_rate_follows_its_schedule() -> None:
    module = Scalar()
    optimizer = descent(module, 0.5)
    rates: list[float] = []

    def loss(m: Scalar, batch: Any) -> torch.Tensor:
        rates.append(optimizer.param_groups[0]["lr"])
        return half_square(m, 100.0)

    fit(module, iter([None] * 4), loss, optimizer, steps=4, max_grad_norm=2.0, schedule=lambda s: 1 / (s + 1))
    assert rates == [0.5, 0.25, 0.5 / 3, 0.125]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert module.w.item() == pytest.approx(2.0 * sum(rates), rel=1e-6)  # every gradient is cut to -2


def test_least_squares_reaches_the_normal_equations_solution() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.1 * torch.randn(50, dtype=torch.float64)
    exact = torch.linalg.solve(x.T @ x, x.T @ y)
    module = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    fit(
        module,
        lambda s: (x, y),
        lambda m, b: ((m(b[0])[:, 0] - b[1]) ** 2).mean(),
        torch.optim.SGD(module.parameters(), lr=0.3),
        steps=200,
        max_grad_norm=None,
    )
    torch.testing.assert_close(module.weight.detach()[0], exact, atol=1e-10, rtol=0)


def test_until_ends_it() -> None:
    module = Scalar()
    seen: list[tuple[int, float]] = []

    def enough(step: int, loss: float) -> bool:
        seen.append((step, loss))
        return step == 2

    optimizer = descent(module, 0.5)
    state = fit(module, lambda s: 1.0, half_square, optimizer, steps=9, max_grad_norm=None, until=enough)
    assert state.step == 2
    fit(module, lambda s: 1.0, half_square, optimizer, steps=1, max_grad_norm=None, until=enough)
    assert seen.pop() == (1, 0.03125)  # the last step is looked at, too
    assert seen == [(1, 0.5), (2, 0.125)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_named_and_changes_nothing(bad: float) -> None:
    module = Scalar(3.0)
    targets = [1.0, bad]
    with pytest.raises(UserError, match="not finite at step 2"):
        fit(module, lambda s: targets[s], half_square, descent(module, 0.25), steps=2, max_grad_norm=None)
    assert module.w.item() == 2.5  # of the first step alone: 3 - 0.25 * (3 - 1)


class Noisy(torch.nn.Module):
    """A linear map behind dropout: its loss depends on torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.nn.functional.dropout(x, 0.5, training=True))


def learn(run: Run, steps: int) -> Noisy:
    torch.manual_seed(1)
    module = Noisy()
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(s)) for s in range(steps)]
    fit(
        module,
        lambda s: batches[s],
        lambda m, x: (m(x) - 1).square().mean(),
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        run,
        steps=steps,
        schedule=lambda s: 1 - s / 20,
        checkpoint_every=3,
    )
    return module


@pytest.fixture
def options(tmp_path: Path) -> RunConfig:
    return RunConfig(dir=str(tmp_path), display="off", tensorboard=False)


def test_a_broken_fit_ends_as_an_unbroken_one(options: RunConfig) -> None:
    with Run.create(options, {}, "whole") as run:
        whole = learn(run, 10)
        rows = read_metrics(run.path)
    with Run.create(options, {}, "broken") as run:
        learn(run, 4)  # the newest checkpoint is of its last step
        again = learn(run, 10)
        resumed = read_metrics(run.path)
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in rows] == [
        (r["step"], r["loss"], r["grad_norm"]) for r in resumed
    ]


def test_steps_after_the_newest_checkpoint_are_done_again(options: RunConfig) -> None:
    with Run.create(options, {}, "whole") as run:
        whole = learn(run, 8)
    with Run.create(options, {}, "killed") as run:
        report = run.report

        def die(step: int, metrics: Any) -> None:
            report(step, metrics)
            if step == 5:  # after the checkpoint of step 3
                raise KeyboardInterrupt

        run.report = die  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            learn(run, 8)
        run.report = report  # type: ignore[method-assign]
        again = learn(run, 8)
        assert [row["step"] for row in read_metrics(run.path)] == list(range(1, 9))
    assert torch.equal(whole.inner.weight, again.inner.weight)


def test_a_signal_ends_it_with_a_checkpoint() -> None:
    class Stopped:
        """A run that is told to stop at its second step."""

        def __init__(self) -> None:
            self.steps: list[int] = []
            self.saved: list[int] = []

        def report(self, step: int, metrics: dict[str, Any]) -> None:
            self.steps.append(step)

        def checkpoint(self, step: int, tree: Any) -> None:
            self.saved.append(step)

        def latest(self) -> None:
            return None

        def resume_at(self, step: int) -> None: ...

        def should_stop(self) -> str | None:
            return "SIGTERM" if self.steps[-1] == 2 else None

    run, module = Stopped(), Scalar()
    state = fit(module, lambda s: 1.0, half_square, descent(module, 0.5), run, steps=9)
    assert (state.step, state.stopped, run.steps, run.saved) == (2, "SIGTERM", [1, 2], [2])
