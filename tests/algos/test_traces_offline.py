"""TraCeS starting from labelled trajectories in a file: constrained from the first iteration on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algos.traces import Traces, TracesConfig
from envs.errors import UserError
from rewards.labels import ThresholdOracle
from rollouts.recorded import LabeledTrajectory, Recording, write_recording
from rollouts.trajectories import EnvSpec
from tests.algos.test_traces_run import EARLY, SMALL
from tests.rollouts.test_recorded import dsrl
from tests.trainers.control_runs import assert_resumes, assert_same, rows, settings, start
from trainers.run import Run

# Of the environment in the tests' small runs: speed <- 0.8 speed + 0.2 throttle, cost while speed > 0.
LIMIT, BUDGET, STEPS = 0.0, 20.0, 50


def driven(throttle: float, seed: int) -> LabeledTrajectory:
    """An episode of Throttle under noisy throttle around a level, labelled by the annotator of the runs."""
    rng = np.random.default_rng(seed)
    actions = np.clip(throttle + 0.3 * rng.standard_normal(STEPS), -1, 1).astype(np.float32)
    obs, speed, last = np.empty((STEPS, 2), np.float32), rng.uniform(-1, 1), 0.0
    rewards = np.empty(STEPS, np.float32)
    for t, a in enumerate(actions):
        obs[t] = speed, last
        speed, last = 0.8 * speed + 0.2 * a, a
        rewards[t] = speed
    ends = np.arange(5, STEPS + 1, 5)
    labels = ThresholdOracle(BUDGET).label(rewards > LIMIT, ends, False, rng)
    return LabeledTrajectory(
        obs=obs, actions=actions[:, None], rewards=rewards, terminated=False, ends=ends, labels=labels
    )


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offline") / "throttle"
    kept = [driven(level, seed) for seed, level in enumerate(np.linspace(-0.6, 0.6, 60))]
    assert 20 < sum(t.labels[-1] for t in kept) < 40
    write_recording(path, Recording(env_id="Throttle-v0", trajectories=kept))
    return path


OFFLINE = [*EARLY, "algo.estimator.pretrain_updates=150", "algo.gate_tries=3"]


@pytest.fixture(scope="module")
def unbroken(ray: Any, recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start("traces", tmp_path_factory.mktemp("runs"), *OFFLINE, f"algo.offline={recording}")


def test_the_constraint_is_active_before_the_first_iteration(unbroken: Run) -> None:
    first = rows(unbroken)[0]
    assert first["constraint_active"] == 1
    assert first["estimator_version"] >= 1
    assert first["multiplier"] > 0
    assert first["p_safe"] is not None
    # What was given is not counted as asked for: 8 labels at most, two of four episodes an iteration.
    assert [row["labels_used"] for row in rows(unbroken)] == [0, 2, 2, 4, 4, 6, 6, 8]
    log = (unbroken.path / "events.log").read_text()
    assert "pretrained on 60 trajectories" in log
    assert "constraint active after 60 labelled trajectories" in log


def test_it_is_deterministic_and_resumes(unbroken: Run, recording: Path, tmp_path: Path) -> None:
    given = (*OFFLINE, f"algo.offline={recording}")
    assert_same(unbroken, start("traces", tmp_path / "a", *given))
    assert_resumes(unbroken, "traces", tmp_path / "b", [1, 3], *given)


def test_pretraining_tells_safe_from_unsafe(recording: Path) -> None:
    spec = EnvSpec(obs_dim=2, action_low=-np.ones(1), action_high=np.ones(1), horizon=STEPS)
    a = Traces(TracesConfig(budget=BUDGET, slice_steps=5, offline=str(recording)), spec, seed=0)
    a.begin(None, resumed=False)
    assert a.active
    fresh = [driven(level, seed) for seed, level in enumerate([-0.6, -0.4, 0.4, 0.6], 1000)]
    scores = []
    for t in fresh:
        x = torch.from_numpy(np.concatenate([t.obs, t.actions], 1))[:, None]
        with torch.no_grad():
            scores.append(float(a.estimator.episode_p_safe(float(a.estimator.credit(x)[0].sum()))))
    assert [t.labels[-1] for t in fresh] == [1, 1, 0, 0]
    assert min(scores[:2]) > 0.8
    assert max(scores[2:]) < 0.3
    b = Traces(TracesConfig(budget=BUDGET, slice_steps=5, offline=str(recording)), spec, seed=0)
    b.begin(None, resumed=True)
    assert (b.active, b.labeled) == (False, [])


def test_a_failed_gate_leaves_the_warm_up_to_do_its_work(recording: Path, ray: Any, tmp_path: Path) -> None:
    """One update teaches nothing; the run says so and labels on, as it does without a file."""
    given = [
        *SMALL,
        f"algo.offline={recording}",
        "algo.estimator.pretrain_updates=1",
        "rollout.env_steps=600",
    ]
    run = start("traces", tmp_path, *given, f"algo.budget={BUDGET}")
    log = (run.path / "events.log").read_text()
    assert "pretrained on 60" in log
    assert "calibration gate not passed" in log
    assert [row["constraint_active"] for row in rows(run)] == [0, 0, 0]
    assert [row["labels_used"] for row in rows(run)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("env.horizon=40", "offline trajectory 0 is longer than an episode of this run"),
        ("env.id=Pendulum-v1", "the offline trajectories are of another environment"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(
    recording: Path, tmp_path: Path, change: str, message: str
) -> None:
    cost = ["env.cost=obs_above:0:0.5"] if "Pendulum" in change else []
    with pytest.raises(UserError, match=message):
        settings("traces", tmp_path, *SMALL, f"algo.offline={recording}", change, *cost)


def test_one_class_is_refused_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "slow"
    kept = [driven(-0.6, seed) for seed in range(5)]
    write_recording(path, Recording(env_id="Throttle-v0", trajectories=kept))
    with pytest.raises(UserError, match="the offline labels are of one class: all 5 trajectories are safe"):
        settings("traces", tmp_path, *SMALL, f"algo.offline={path}")


def test_dsrl_of_another_size_is_refused_before_the_start(tmp_path: Path) -> None:
    path = dsrl(tmp_path / "a.hdf5")
    with pytest.raises(UserError, match="of another environment") as caught:
        settings("traces", tmp_path, *SMALL, "algo.slice_steps=2", f"algo.offline={path}")
    assert "observations of 3, actions of 2 numbers" in str(caught.value)
    with pytest.raises(UserError, match="no such file of offline trajectories"):
        settings("traces", tmp_path, *SMALL, "algo.offline=nowhere")
