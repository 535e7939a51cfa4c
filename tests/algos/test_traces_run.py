"""TraCeS with the whole engine: it learns, it is deterministic, it resumes, it survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.algos.test_ppo_lag_run import LEARN
from tests.trainers.control_runs import (
    arm,
    assert_resumes,
    assert_same,
    assert_struck_once,
    faulty,
    rows,
    start,
)
from trainers.run import Run

SMALL = ["algo.slice_steps=5", "algo.start_window=4", "algo.estimator.batch_trajectories=16"]
# Labels are mixed from the first iteration on, and the constraint starts after the second.
EARLY = [
    *SMALL,
    "env.options.limit=0.0",
    "env.options.spread=1.0",
    "algo.budget=20",
    "algo.start_unsafe_share=0.25",
    "algo.start_labels=8",
    "algo.gate_tries=1",
    "algo.query_min=2",
    "algo.estimator.pretrain_updates=5",
    "algo.estimator.retrain_updates=3",
]


def test_it_learns(ray: Any, tmp_path: Path) -> None:
    """It keeps a budget it is never told; without one the same steps cost more than 40 (PPO)."""
    overrides = [*LEARN, "rollout.env_steps=24000", *SMALL, "algo.window_episodes=8", "algo.start_labels=24"]
    run = start("traces", tmp_path, *overrides, "algo.estimator.pretrain_updates=200")
    first, last = rows(run)[:10], rows(run)[-10:]
    assert max(row["episode_cost"] for row in first) > 20
    assert np.mean([row["episode_cost"] for row in last]) <= 10
    assert np.mean([row["episode_return"] for row in last]) > 8
    assert last[-1]["labels_used"] < 200


@pytest.fixture(scope="module")
def unbroken(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start("traces", tmp_path_factory.mktemp("runs"), *EARLY)
    assert [row["constraint_active"] for row in rows(run)] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert len({row["estimator_version"] for row in rows(run)}) > 3
    return run


def test_it_is_deterministic(unbroken: Run, tmp_path: Path) -> None:
    assert_same(unbroken, start("traces", tmp_path, *EARLY, name="again"))
    assert rows(unbroken) != rows(start("traces", tmp_path, *EARLY, "run.seed=1", name="other"))


# The constraint becomes active in step 2: before, at and after it, and twice in a row.
@pytest.mark.parametrize("stops", [[1], [2], [3], [1, 2], [2, 5]])
def test_it_resumes(unbroken: Run, tmp_path: Path, stops: list[int]) -> None:
    assert_resumes(unbroken, "traces", tmp_path, stops, *EARLY)


def test_it_survives_the_loss_of_an_env_runner(unbroken: Run, tmp_path: Path) -> None:
    """SIGKILL of the only one, in the iteration in which the constraint becomes active, leaves no trace."""
    armed = tmp_path / "armed"
    arm(armed)
    overrides = (*EARLY, *faulty("die", armed, at=330), "rollout.num_env_runners=1")
    run = start("traces", tmp_path, *overrides)
    assert not armed.exists()
    assert_struck_once(run)
    assert_same(unbroken, run)
