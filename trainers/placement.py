"""Where a learner runs: in this process, or in N processes of Ray Train. Knows nothing of what it learns.

    run_learner(make_learner, cfg, run)      # make_learner(WorkerContext) -> an object with learn()

The driver owns the run directory. A worker reports, saves and asks whether to stop through its context's
`client`, which has the same methods as `Run`; without workers the client is the run itself. When a worker
dies, the group starts again from the newest whole checkpoint, with the next attempt's number.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from envs.errors import UserError
from trainers.checkpoint import Tree

if TYPE_CHECKING:
    from trainers.run import Run


class RunClient(Protocol):
    """What a learner may do to its run; `trainers.run.Run` says what each does."""

    def report(self, step: int, metrics: dict[str, Any]) -> None: ...
    def event(self, text: str) -> None: ...
    def checkpoint(self, step: int, tree: Tree) -> Any: ...
    def should_stop(self) -> str | None: ...


@dataclass(kw_only=True)
class WorkerContext:
    """What a learner is told about its place.

    rank: 0 to world_size - 1; attempt: how often the group has started in this run, from 0;
    resumed: (step, tree) to go on from; client: the run; scratch: a private folder, gone afterwards.
    """

    client: RunClient
    scratch: str
    rank: int = 0
    world_size: int = 1
    attempt: int = 0
    resumed: tuple[int, Tree] | None = None


class Learner(Protocol):
    """What `run_learner` needs of a learner."""

    def learn(self) -> None:
        """Train from `context.resumed` (or the start) to the end of the plan, or until asked to stop."""


ZERO_STAGES = {"zero2": 2, "zero3": 3}
MakeLearner = Callable[[WorkerContext], Learner]


def check_placement(cfg: Any) -> None:
    """Raise UserError for a placement that cannot work."""
    if cfg.learner.num_workers < 0:
        raise UserError(
            "learner.num_workers must be at least 0",
            given=cfg.learner.num_workers,
            allowed="0: in the driver's process; N >= 1: N processes of Ray Train",
        )
    backends = ("ddp", *ZERO_STAGES)
    if cfg.learner.backend not in backends:
        raise UserError("unknown learner.backend", given=cfg.learner.backend, allowed=backends)
    if cfg.learner.backend != "ddp" and cfg.learner.num_workers == 0:
        raise UserError(
            f"learner.backend={cfg.learner.backend} spreads a model over processes, and there is only one",
            given=f"learner.num_workers={cfg.learner.num_workers}",
            fix="set learner.num_workers=2 or more, or learner.backend=ddp",
        )
    if cfg.learner.backend != "ddp" and find_spec("deepspeed") is None:
        raise UserError(
            f"learner.backend={cfg.learner.backend} needs the package deepspeed",
            fix="DS_BUILD_OPS=0 pip install deepspeed, or set learner.backend=ddp",
        )


def backend_arguments(cfg: Any) -> dict[str, Any]:
    """TRL's arguments for `learner.backend`: how parameters, gradients and optimizer are spread.

    ddp: whole in every process; zero2: gradients and optimizer state split; zero3: parameters too.
    """
    if cfg.learner.backend == "ddp":
        return {}
    return {
        "deepspeed": {
            "zero_optimization": {"stage": ZERO_STAGES[cfg.learner.backend]},
            "zero_allow_untested_optimizer": True,  # torch's own AdamW, as under ddp
            "zero_force_ds_cpu_optimizer": False,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
        }
    }


def run_learner(make_learner: MakeLearner, cfg: Any, run: Run) -> None:
    """Train to the end of the plan; resumes by itself when the run has a checkpoint.

    `make_learner` is called once in every process, and again after a restart; for N >= 1 workers it must be
    picklable. Raises UserError for what the user can mend; the newest checkpoint stays whole in every case.
    """
    check_placement(cfg)
    if cfg.learner.num_workers == 0:
        _run_here(make_learner, run)
    else:
        from trainers.worker_group import run_workers

        run_workers(make_learner, cfg, run)


def _run_here(make_learner: MakeLearner, run: Run) -> None:
    with tempfile.TemporaryDirectory(prefix="learner-") as scratch:
        saved = run.latest()
        run.resume_at(saved[0] if saved else 0)
        context = WorkerContext(client=run, scratch=scratch, attempt=next_attempt(saved), resumed=saved)
        with run.starting():
            learner = make_learner(context)
        learner.learn()


def next_attempt(saved: tuple[int, Tree] | None) -> int:
    """The attempt's number of a group that starts from this checkpoint."""
    return 0 if saved is None else saved[1]["attempt"] + 1
