"""PPO-Lagrangian with the whole engine: it learns, it is deterministic, it resumes, it survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainers.control_runs import arm, assert_resumes, assert_same, faulty, rows, start
from trainers.run import Run

LEARN = ["rollout.num_envs=8", "rollout.env_steps=16000", "learner.minibatch_steps=100"]
LEARN += ["learner.lr=3e-3", "learner.critic_lr=3e-3", "learner.epochs=10", "algo.budget=10"]
# Half of the first steps cost something, so the multiplier moves from the first iteration on.
EARLY = ["env.options.limit=0.0", "env.options.spread=1.0", "algo.budget=20"]


def test_it_learns(ray: Any, tmp_path: Path) -> None:
    """The best return breaks the budget, which only the constrained learner keeps."""
    free = rows(start("ppo", tmp_path, *LEARN, name="ppo"))[-10:]
    held = rows(start("ppo_lag", tmp_path, *LEARN, "algo.window_episodes=8", name="ppo_lag"))[-10:]
    assert np.mean([row["episode_cost"] for row in free]) > 40
    assert np.mean([row["episode_return"] for row in free]) > 30
    assert np.mean([row["episode_cost"] for row in held]) <= 10
    assert np.mean([row["episode_return"] for row in held]) > 10


@pytest.fixture(scope="module")
def unbroken(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start("ppo_lag", tmp_path_factory.mktemp("runs"), *EARLY)


def test_it_is_deterministic(unbroken: Run, tmp_path: Path) -> None:
    assert_same(unbroken, start("ppo_lag", tmp_path, *EARLY, name="again"))
    assert rows(unbroken) != rows(start("ppo_lag", tmp_path, *EARLY, "run.seed=1", name="other"))
    assert len({row["multiplier"] for row in rows(unbroken)}) > 4


@pytest.mark.parametrize("stops", [[1], [3, 6]])
def test_it_resumes(unbroken: Run, tmp_path: Path, stops: list[int]) -> None:
    assert_resumes(unbroken, "ppo_lag", tmp_path, stops, *EARLY)


def test_it_resumes_with_a_pid_multiplier(ray: Any, tmp_path: Path) -> None:
    overrides = (*EARLY, "algo.multiplier.kind=pid", "algo.multiplier.kd=0.1")
    run = start("ppo_lag", tmp_path, *overrides)
    assert_resumes(run, "ppo_lag", tmp_path, [4], *overrides)
    assert len({row["multiplier"] for row in rows(run)}) > 4


def test_it_survives_the_loss_of_an_env_runner(ray: Any, tmp_path: Path) -> None:
    """SIGKILL of one of two in the middle of an episode of the second iteration leaves no trace."""
    armed = tmp_path / "armed"
    overrides = [*EARLY, *faulty("die", armed, at=130), "rollout.num_env_runners=2", "rollout.env_steps=800"]
    undisturbed = start("ppo_lag", tmp_path, *overrides, name="undisturbed")
    arm(armed)
    disturbed = start("ppo_lag", tmp_path, *overrides, name="disturbed")
    assert not armed.exists()
    assert "its share is drawn again" in (disturbed.path / "events.log").read_text()
    assert_same(undisturbed, disturbed)
