"""Small language runs through the launcher's own config, and what two of them are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import arguments, config
from trainers.config import typed
from trainers.language import check, train
from trainers.run import Run

# One addition of 0, 1 or 2 a prompt, and a model that starts from nothing.
SMALL = [
    "env.options.steps=1",
    "env.options.largest=2",
    "model.tiny_width=64",
    "model.tiny_warmup_steps=0",
    "run.display=off",
    "run.tensorboard=false",
    "run.checkpoint_every=1000",
]


def settings(algo: str, folder: Path, *overrides: str) -> tuple[Any, dict[str, Any]]:
    """The typed and the plain config of a small run under `folder`, checked as the launcher does it."""
    line = arguments.read([f"algo={algo}", *SMALL, f"run.dir={folder}", *overrides]).argv
    values = config.resolved(config.compose(line))
    cfg = typed(values)
    check(cfg)
    return cfg, values


def start(algo: str, folder: Path, *overrides: str, name: str = "run") -> Run:
    """A new run, trained to the end of its plan."""
    cfg, values = settings(algo, folder, *overrides)
    with Run.create(cfg.run, values, name) as run:
        train(cfg, run)
    return run


def resume(run: Run, **changes: Any) -> Run:
    """Take a run up again with other run options."""
    cfg = typed(run.config)
    for name, value in changes.items():
        setattr(cfg.run, name, value)
    with Run.open(run.path, cfg=cfg.run) as again:
        train(cfg, again)
    return again
