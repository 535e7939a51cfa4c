"""A checkpoint's policy plays, the annotator labels, and the file tells the same story as the episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envs.errors import UserError
from evaluators.recorder import record_run
from rewards.labels import ThresholdOracle
from rollouts.recorded import read_recording
from tests.trainers.control_runs import TOYS
from trainers.config import typed
from trainers.control import evaluate
from trainers.run import Run

THROTTLE = {"env.kind": "gym", "env.id": f"{TOYS}:Throttle-v0", "env.horizon": 30, "env.cost": "info:cost"}
FEW = {"episodes": 6, "slice_steps": 10, "oracle": ThresholdOracle(11.0)}


def test_the_labels_follow_from_what_is_recorded(untrained_run: Callable[..., Path], tmp_path: Path) -> None:
    """Observation and action give the speed, the speed the cost, the costs the labels: worked out again."""
    run = untrained_run(**THROTTLE, **{"env.options": {"limit": 0.05, "spread": 0.3}})
    added = record_run(run, tmp_path / "a", **FEW, seed=3)
    found = read_recording(tmp_path / "a")
    assert found.env_id == f"{TOYS}:Throttle-v0"
    assert len(found.trajectories) == len(added) == 6
    for t in found.trajectories:
        speed = 0.8 * t.obs[:, 0] + 0.2 * np.clip(t.actions[:, 0], -1, 1)
        np.testing.assert_allclose(t.obs[1:, 0], speed[:-1], atol=1e-6)
        np.testing.assert_allclose(t.rewards, speed, atol=1e-6)
        costs = np.cumsum(speed > 0.05)
        np.testing.assert_array_equal(t.ends, [10, 20, 30])
        np.testing.assert_array_equal(t.labels, [costs[e - 1] <= 11 for e in t.ends])
        assert not t.terminated
    wholes = [t.labels[-1] for t in found.trajectories]
    assert set(wholes) == {0.0, 1.0}


def test_it_is_the_policy_that_evaluation_plays(untrained_run: Callable[..., Path], tmp_path: Path) -> None:
    path = untrained_run(**THROTTLE)
    record_run(path, tmp_path / "a", **FEW, seed=5)
    run = Run.open(path)
    saved = run.latest()
    assert saved is not None
    played = evaluate(typed(run.config), saved[1], episodes=6, deterministic=False, seed=5)
    returns = [t.rewards.sum(dtype=np.float64) for t in read_recording(tmp_path / "a").trajectories]
    np.testing.assert_allclose(returns, played["episode_return"], rtol=1e-12)


def test_append(untrained_run: Callable[..., Path], tmp_path: Path) -> None:
    run, out = untrained_run(**THROTTLE), tmp_path / "a"
    record_run(run, out, **FEW)
    with pytest.raises(UserError, match="the file exists already") as caught:
        record_run(run, out, **FEW)
    assert "append=true" in str(caught.value)
    record_run(run, out, **{**FEW, "episodes": 2}, seed=1, append=True)
    assert len(read_recording(out).trajectories) == 8


def test_what_is_refused(untrained_run: Callable[..., Path], tmp_path: Path) -> None:
    run = untrained_run(**THROTTLE)
    with pytest.raises(UserError, match="the prefix slice must fit into an episode"):
        record_run(run, tmp_path / "a", **{**FEW, "slice_steps": 31})
    with pytest.raises(UserError, match="a recording needs episodes"):
        record_run(run, tmp_path / "a", **{**FEW, "episodes": 0})
    assert not (tmp_path / "a").exists()


def test_without_a_checkpoint(untrained_run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint yet"):
        record_run(untrained_run(checkpoint=False, **THROTTLE), tmp_path / "a", **FEW)
