"""The control engine with Ray and RLlib: env runners, canaries, numbered weights, what breaks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algos.ppo import PPO
from envs.errors import UserError
from tests.trainers.control_runs import (
    arm,
    assert_same,
    descendants,
    faulty,
    leaves_of,
    resume,
    rows,
    settings,
    start,
    tree,
    wait_for,
)
from trainers.control import env_spec
from trainers.run import Run
from trainers.weights import Weights

SWIMMER = ["env=safety-gym", "env.id=SafetySwimmerVelocity-v1", "env.cost=null", "rollout.env_steps=600"]


def env_runners() -> list[int]:
    """The env runners' process ids of this process's Ray."""
    return [pid for pid, line in descendants(os.getpid()).items() if "ControlEnvRunner" in line]


def assert_none_left() -> None:
    wait_for(lambda: not env_runners(), 10, "env runners outlive their engine")


@pytest.fixture
def engine(ray: Any, tmp_path: Path):
    """make(*overrides) -> an engine that is not trained yet."""
    from trainers.control_rllib import build_engine

    made = []

    def make(*overrides: str):
        cfg, _ = settings("ppo", tmp_path, *overrides)
        spec = env_spec(cfg)
        made.append(build_engine(cfg, spec, PPO(cfg.algo, spec, cfg.run.seed)))
        return made[-1]

    yield make
    for one in made:
        one.stop()


# --- env runners


def test_a_task_is_the_same_in_2_env_runners(ray: Any, tmp_path: Path) -> None:
    """Up to rounding: matrix products of other shapes. In 1 runner it is the same to the bit, see below."""
    here, there = (
        start("ppo_lag", tmp_path, *SWIMMER, f"rollout.num_env_runners={n}", name=str(n)) for n in (0, 2)
    )
    assert rows(here)[0]["episode_cost"] > 0
    for row, other in zip(rows(here), rows(there), strict=True):
        assert row["sampler_mismatch"] < 1e-5
        assert other["sampler_mismatch"] < 1e-5
        assert row.keys() == other.keys()
        for key, value in row.items():
            assert other[key] == (None if value is None else pytest.approx(value, rel=1e-3, abs=1e-4)), key
    assert_none_left()


def test_an_env_runner_that_dies_between_iterations(engine) -> None:
    here, there = engine(), engine("rollout.num_env_runners=1")
    for one in (here, there):
        one.train()
    os.kill(env_runners()[0], signal.SIGKILL)
    for one in (here, there):
        one.train()
    assert (here.env_runner_restarts, there.env_runner_restarts) == (0, 1)
    assert there.env_steps == here.env_steps == 400
    assert there.last_report["episode_return"] == here.last_report["episode_return"]
    assert there.notices == [
        "env runner 1 died; a new one takes its place and its share is drawn again",
    ]


def test_an_env_runner_that_keeps_dying(ray: Any, tmp_path: Path) -> None:
    arm(tmp_path / "armed")
    fault = faulty("die_always", tmp_path / "armed", at=30)
    with pytest.raises(UserError, match="env runner 1 died in iteration 0 and is not started again") as error:
        start("ppo", tmp_path, *fault, "rollout.num_env_runners=1", "rollout.max_restarts=1")
    assert "rollout.max_restarts=1" in str(error.value)
    assert_none_left()


def test_an_environment_that_hangs(ray: Any, tmp_path: Path) -> None:
    arm(tmp_path / "armed")
    fault = faulty("hang", tmp_path / "armed", at=30)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"the learner waited 2 s for env runners \[1\] in iteration 0"):
        start("ppo", tmp_path, *fault, "rollout.num_env_runners=1", "rollout.timeout_s=2")
    assert time.monotonic() - began < 60
    assert_none_left()


def test_an_environment_that_cannot_be_made_in_an_env_runner(ray: Any, tmp_path: Path) -> None:
    arm(tmp_path / "armed")
    fault = faulty("refuse", tmp_path / "armed")
    with pytest.raises(RuntimeError, match="no licence for this simulator") as error:
        start("ppo", tmp_path, *fault, "rollout.num_env_runners=1")
    assert error.value.__notes__ == ["(in env runner 1, iteration 0)"]
    assert "toy_envs.py" in str(error.value.__cause__), "the traceback of the other process"


def test_nan_in_an_env_runner_names_tensor_and_step(ray: Any, tmp_path: Path) -> None:
    arm(tmp_path / "armed")
    fault = faulty("blank", tmp_path / "armed", at=4 * 60 + 4 * 7 + 3)  # four environments take turns
    what = "the environment returned a number that is not finite: rewards at step 17 of environment 2, "
    with pytest.raises(UserError, match=what + "iteration 1"):
        start("ppo", tmp_path, *fault, "rollout.num_env_runners=1")


def test_a_run_that_failed_goes_on_after_its_last_whole_iteration(ray: Any, tmp_path: Path) -> None:
    """Also in another number of env runners: in one and in none it is the same to the last bit."""
    armed = tmp_path / "armed"
    fault = faulty("raise", armed, at=2 * 200 + 7)
    whole = start("ppo_lag", tmp_path, *fault, "rollout.env_steps=600", name="whole")
    arm(armed)
    with pytest.raises(RuntimeError, match="the simulator lost its contact model"):
        start(
            "ppo_lag", tmp_path, *fault, "rollout.env_steps=600", "rollout.num_env_runners=1", name="broken"
        )
    broken = Run.open("broken", tmp_path)
    assert len(rows(broken)) == 2
    found = broken.latest()
    assert found is not None
    assert found[0] == 2
    assert_same(whole, resume(broken, num_env_runners=0))


def test_a_run_that_failed_in_an_update_keeps_the_checkpoint_it_has(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner had begun to change: what it holds is of no iteration."""
    monkeypatch.setattr(PPO, "after_step", fail_in_iteration_2)
    with pytest.raises(RuntimeError, match="no estimator"):
        start("ppo", tmp_path, "run.checkpoint_every=1")
    found = Run.open("run", tmp_path).latest()
    assert found is not None
    assert found[0] == 2


def fail_in_iteration_2(self: PPO, rollout: Any, costs: Any, iteration: int) -> dict[str, Any]:
    if iteration == 2:
        raise RuntimeError("no estimator")
    return {}


def test_a_stop_leaves_the_iteration_that_is_being_sampled(engine, tmp_path: Path) -> None:
    """In an env runner that would take an hour, and in this process; then it is drawn again, the same."""
    arm(tmp_path / "armed")
    fault = faulty("hang", tmp_path / "armed", at=200 + 30)
    here, there = engine(*fault), engine(*fault, "rollout.num_env_runners=1")
    asked = iter([None] * 20 + ["SIGTERM"] * 9)
    for one in (here, there):
        one.train()
    began = time.monotonic()
    here.should_stop, there.should_stop = lambda: next(asked), lambda: time.monotonic() - began > 1
    for one in (here, there):
        one.train()
        assert (one.step_number, one.env_steps, one.updating) == (1, 200, False)
    assert len(list(asked)) == 8, "the loop in this process ended when it was first told to"
    assert time.monotonic() - began < 60
    here.should_stop = lambda: None
    here.train()
    whole = engine(*fault)
    for _ in range(2):
        whole.train()
    assert leaves_of(here.state_tree()) == leaves_of(whole.state_tree())


# --- canaries and numbered weights


def test_without_a_learning_rate_no_weight_moves(ray: Any, tmp_path: Path) -> None:
    still = ["learner.lr=0", "learner.critic_lr=0", "algo.multiplier.init=1.0", "run.checkpoint_every=1"]
    first = tree(start("ppo_lag", tmp_path, *still, "run.max_steps=1", name="first"))
    last = tree(start("ppo_lag", tmp_path, *still, "run.max_steps=4", name="last"))
    nets = [key for key in first if key.startswith("/learner/nets")]
    assert len(nets) == 3 * 6 + 1
    assert all(first[key] == last[key] for key in nets)
    assert first["/learner/obs_norm/mean"] != last["/learner/obs_norm/mean"]


def test_only_the_critics_learn_without_the_actors_learning_rate(ray: Any, tmp_path: Path) -> None:
    run = start("ppo", tmp_path, "learner.lr=0", "run.max_steps=1", name="first")
    first, last = tree(run), tree(resume(run, max_steps=3))
    moved = {key for key in first if key.startswith("/learner/nets") and first[key] != last[key]}
    assert moved == {key for key in first if key.startswith("/learner/nets/reward_critic")}
    assert [row["kl"] for row in rows(run)] == [0.0] * 3


def test_the_update_on_the_first_ratios_is_on_policy(engine) -> None:
    one = engine("learner.epochs=1", "learner.minibatch_steps=200", "learner.lr=1e-9")
    one.train()
    assert one.last_report["sampler_mismatch"] < 1e-5
    assert abs(one.last_report["kl"]) < 1e-6
    assert one.last_report["clip_fraction"] == 0.0


def test_weights_that_change_on_the_way_are_refused(engine) -> None:
    one = engine()
    weights = Weights(version=(0, 0), policy=one.learner.policy(), cost_model=one.algorithm.cost_model).seal()
    sample = {"shard": 0, "envs": range(4), "iteration": 0, "steps": 50}
    one.env_runner.sample(weights=weights, **sample)
    weights.policy.layers[1][0][3, 3] += 1e-7
    with pytest.raises(RuntimeError, match=r"weights \(0, 0\) arrived with another checksum"):
        one.env_runner.sample(weights=weights, **sample)


def test_samples_of_other_weights_are_refused(engine) -> None:
    one = engine()
    weights = Weights(version=(0, 0), policy=one.learner.policy(), cost_model=one.algorithm.cost_model)
    weights.policy.layers[2][1][:] += 0.01
    sample = {"shard": 0, "envs": range(4), "iteration": 0, "steps": 50}
    _, rollout, _ = one.env_runner.sample(weights=weights.seal(), **sample)
    with pytest.raises(UserError, match="acted under other weights than the learner's"):
        one.learner.update(
            rollout=rollout,
            augment=one.algorithm.cost_model.augment,
            costs=None,
            multiplier=0.0,
            progress=0.0,
            lr_scale=1.0,
            iteration=0,
        )


def test_a_loss_that_is_not_finite_names_the_iteration(engine) -> None:
    one = engine()
    one.train()
    with torch.no_grad():
        one.learner.nets.reward_critic[0].weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="the learner's loss is not finite in iteration 1"):
        one.train()


def test_time_does_not_stand_still(engine) -> None:
    """`first_env_step_time` is the wall clock at the first step, whoever took it."""
    before = time.time()
    one = engine()
    one.train()
    assert before < one.first_env_step_time < time.time()
    assert np.isfinite(one.last_report["steps_per_second"])
