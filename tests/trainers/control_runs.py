"""Small control runs in this process, and what two of them are compared by."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch import arguments, config
from trainers.config import TrainConfig, typed
from trainers.control import check, train
from trainers.run import Run

TOYS = "tests.trainers.toy_envs"
SMALL = [
    "env=gym",
    f"env.id={TOYS}:Throttle-v0",
    "env.horizon=50",
    "env.cost=info:cost",
    "rollout.num_envs=4",
    "rollout.num_env_runners=0",
    "rollout.env_steps=1600",  # 8 iterations
    "learner.minibatch_steps=50",
    "learner.epochs=2",
    "run.display=off",
    "run.tensorboard=false",
    "run.checkpoint_every=100",
]
TIMINGS = {"seconds", "steps_per_second", "seconds_sampling", "seconds_update", "seconds_algorithm"}
TIMINGS |= {"first_env_step_seconds", "env_runner_restarts"}

Runs = Callable[..., Run]  # run(algo, *overrides, name=...)


def settings(algo: str, folder: Path, *overrides: str) -> tuple[TrainConfig, dict[str, Any]]:
    """The typed and the plain config of a small run under `folder`, checked as the launcher does it."""
    line = arguments.read([f"algo={algo}", *SMALL, f"run.dir={folder}", *overrides]).argv
    values = config.resolved(config.compose(line))
    cfg = typed(values)
    check(cfg)
    return cfg, values


def start(algo: str, folder: Path, *overrides: str, name: str = "run") -> Run:
    """A new run, trained to the end of its plan."""
    cfg, values = settings(algo, folder, *overrides)
    run = Run.create(cfg.run, values, name)
    with run:
        train(cfg, run)
    return run


def resume(run: Run, **changes: Any) -> Run:
    """`run` taken up from its newest checkpoint, with changes such as max_steps and num_env_runners."""
    values = json.loads((run.path / "config.json").read_text())
    for key, value in changes.items():
        values["rollout" if key in values["rollout"] else "run"][key] = value
    cfg = typed(values)
    again = Run.open(run.path, cfg=cfg.run)
    with again:
        train(cfg, again)
    return again


def rows(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock or a restart decides."""
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def tree(run: Run) -> dict[str, Any]:
    """Every leaf of the newest checkpoint by path, arrays as (dtype, shape, bytes); without the attempt."""
    found = run.latest()
    assert found is not None
    return {"step": found[0], **leaves_of(found[1])}


def leaves_of(state: dict[str, Any]) -> dict[str, Any]:
    """Every leaf of a checkpoint tree by path, arrays as (dtype, shape, bytes); without the attempt."""
    leaves: dict[str, Any] = {}
    _flatten(state, "", leaves)
    del leaves["/engine/attempt"]
    return leaves


def _flatten(node: Any, path: str, leaves: dict[str, Any]) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            _flatten(value, f"{path}/{key}", leaves)
    elif isinstance(node, torch.Tensor | np.ndarray):
        array = np.asarray(node)
        leaves[path] = (array.dtype.str, array.shape, array.tobytes())
    else:
        leaves[path] = node


def assert_same(run: Run, other: Run) -> None:
    """The same metrics in every line, the same bytes in every leaf of the last checkpoint."""
    assert rows(run) == rows(other)
    a, b = tree(run), tree(other)
    assert a.keys() == b.keys()
    assert [key for key in a if a[key] != b[key]] == []


def assert_resumes(unbroken: Run, algo: str, folder: Path, stops: list[int], *overrides: str) -> None:
    """A run stopped after each of `stops` steps ends as `unbroken` did, which never stopped."""
    broken = start(algo, folder, *overrides, f"run.max_steps={stops[0]}", name="broken")
    for stop in [*stops[1:], None]:
        broken = resume(broken, max_steps=stop)
    found = broken.latest()
    assert found is not None
    assert found[1]["engine"]["attempt"] == len(stops)
    assert_same(unbroken, broken)


def faulty(fault: str, armed: Path, at: int = 1, **options: Any) -> list[str]:
    """Settings for the environment that misbehaves once `armed` exists, see toy_envs."""
    given = {"fault": fault, "armed": f"'{armed}'", "at": at, **options}
    return [f"env.id={TOYS}:Faulty-v0", *(f"env.options.{key}={value}" for key, value in given.items())]


def arm(armed: Path) -> None:
    """From now on the fault strikes, in other processes than this one."""
    armed.write_text(str(os.getpid()))


def assert_struck_once(run: Run) -> None:
    """The log and the metrics of `run` tell of one env runner that was replaced in step 2."""
    restarts = [json.loads(x)["env_runner_restarts"] for x in (run.path / "metrics.jsonl").open()]
    assert restarts == [0] + [1] * (len(restarts) - 1)
    assert "env runner 1 died; a new one takes its place" in (run.path / "events.log").read_text()


def descendants(pid: int) -> dict[int, str]:
    """The living processes that `pid` started, directly or not, as {process id: command line}."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
                lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    found: dict[int, str] = {}
    new = {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= {child: lines[child] for child in new}
    return found


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `condition()`; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value
