"""`fit`: the loop of everything that learns and is neither a policy nor a TRL trainer. Knows no model.

Estimators, probes, encoders, warm-ups: a module, batches, a loss, an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from envs.errors import UserError


class Watcher(Protocol):
    """What `fit` may do to a run; `trainers.run.Run` has these methods."""

    def report(self, step: int, metrics: dict[str, Any]) -> None: ...
    def checkpoint(self, step: int, tree: Any) -> Any: ...
    def latest(self) -> tuple[int, Any] | None: ...
    def resume_at(self, step: int) -> None: ...
    def should_stop(self) -> str | None: ...


@dataclass(kw_only=True)
class FitState:
    """Where a fit is: the step it has done, and why it ended ("", or a signal's name)."""

    step: int = 0
    loss: float = float("nan")
    stopped: str = ""


def fit(
    module: nn.Module,
    batches: Callable[[int], Any] | Iterator[Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    run: Watcher | None = None,
    *,
    steps: int,
    max_grad_norm: float | None = 1.0,
    schedule: Callable[[int], float] | None = None,
    checkpoint_every: int | None = None,
    until: Callable[[int, float], bool] | None = None,
) -> FitState:
    """Take `steps` optimizer steps on loss(module, batch).

    `batches` is a function of the step (then a resumed fit sees what an unbroken one sees) or an iterator.
    `schedule` gives the factor of the learning rate at a step; `until(step, loss)` ends early. With a run,
    every step is reported, and `fit` goes on from its newest checkpoint. Raises UserError for a loss or
    gradient that is not finite.
    """
    state = FitState()
    base = [group["lr"] for group in optimizer.param_groups]
    if run is not None:
        state.step = _resume(module, optimizer, run)
    while state.step < steps:
        batch = batches(state.step) if callable(batches) else next(batches)
        for group, lr in zip(optimizer.param_groups, base):
            group["lr"] = lr * (schedule(state.step) if schedule else 1.0)
        optimizer.zero_grad(set_to_none=True)
        value = loss(module, batch)
        value.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm or float("inf"))
        state.loss = float(value.detach())
        if not (torch.isfinite(norm) and torch.isfinite(value.detach())):
            raise UserError(
                f"the loss is not finite at step {state.step + 1}",
                given=f"loss {state.loss}, gradient norm {float(norm)}",
                fix="lower the learning rate, or look at that step's batch",
            )
        optimizer.step()
        state.step += 1
        if run is not None:
            run.report(state.step, {"loss": state.loss, "grad_norm": float(norm)})
            state.stopped = run.should_stop() or ""
        enough = until is not None and until(state.step, state.loss)
        last = enough or state.step == steps or bool(state.stopped)
        if run is not None and (last or (checkpoint_every and state.step % checkpoint_every == 0)):
            run.checkpoint(state.step, _tree(module, optimizer))
        if last:
            break
    for group, lr in zip(optimizer.param_groups, base):
        group["lr"] = lr
    return state


def _tree(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from trainers import learner_state

    names = {id(p): name for name, p in module.named_parameters()}
    return {
        "module": dict(module.state_dict()),
        "optimizer": learner_state.optimizer_state(optimizer, names),
        "rng": learner_state.rng_state(),
    }


def _resume(module: nn.Module, optimizer: torch.optim.Optimizer, run: Watcher) -> int:
    from trainers import learner_state

    saved = run.latest()
    run.resume_at(saved[0] if saved else 0)
    if saved is None:
        return 0
    tree = saved[1]
    module.load_state_dict({k: torch.as_tensor(v) for k, v in tree["module"].items()})
    names = {id(p): name for name, p in module.named_parameters()}
    learner_state.load_optimizer_state(optimizer, names, tree["optimizer"])
    learner_state.set_rng_state(tree["rng"])
    return saved[0]
