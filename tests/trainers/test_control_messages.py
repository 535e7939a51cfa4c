"""What a user reads when the control engine cannot do what was asked, through the launcher."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import preflight, train
from tests.trainers import toy_envs
from tests.trainers.control_runs import SMALL, assert_same, faulty, resume, rows, start
from trainers.run import Run

Launch = Callable[..., tuple[int, str]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Launch:
    """`launch("algo=ppo", ...)` -> (exit code, all that was printed), in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py"])
        try:
            code = train.main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        said = "".join(capfd.readouterr())
        assert "Traceback" not in said
        return code, said

    return run


@pytest.mark.parametrize(
    ("algo", "arguments", "message"),
    [
        ("ppo_lag", ["env=gym", "env.id=Pendulum-v1"], "constrains a cost, but this environment has none"),
        ("traces", ["env=gym", "env.id=Pendulum-v1"], "constrains a cost, but this environment has none"),
        ("ppo", ["algo.budget=-1"], "a cost budget cannot be negative"),
        ("ppo_lag", ["algo.budget=-0.5"], "a cost budget cannot be negative"),
        ("traces", ["algo.budget=-25"], "a cost budget cannot be negative"),
        ("traces", ["algo.slice_steps=51", "env.horizon=50"], "the prefix slice must fit into an episode"),
        ("traces", ["algo.slice_steps=0"], "the prefix slice must fit into an episode"),
        ("traces", ["algo.noise=0.5"], r"allowed: [0, 0.5)"),
        ("traces", ["algo.noise=-0.1"], r"allowed: [0, 0.5)"),
        ("traces", ["algo.noise=0.2"], "can never reach the P_safe limit"),
        ("traces", ["algo.noise=0.1", "algo.p_safe_limit=0.9"], "fix:     set algo.p_safe_limit=0.81"),
        ("traces", ["algo.p_safe_limit=1.0"], "algo.p_safe_limit is a probability"),
        ("traces", ["algo.estimator.head=normal"], "unknown estimator head"),
        ("traces", ["algo.warmup_labels=0"], "algo.warmup_labels is too small"),
        ("traces", ["algo.window_episodes=0"], "algo.window_episodes is too small"),
        ("ppo_lag", ["algo.window_episodes=0"], "algo.window_episodes is too small"),
        ("traces", ["algo.lr_scale_active=-1"], "algo.lr_scale_active is too small"),
        ("traces", ["algo.slack_scale=-0.1"], "algo.slack_scale is too small"),
        ("traces", ["algo.query_fraction=0"], "algo.query_fraction must be more than 0"),
        ("traces", ["algo.estimator.class_weight=0"], "algo.estimator.class_weight must be more than 0"),
        ("traces", ["algo.estimator.held_out_every=1"], "algo.estimator.held_out_every is too small"),
        ("traces", ["algo.estimator.batch_trajectories=0"], "batch_trajectories is too small"),
        ("traces", ["algo.estimator.pretrain_updates=0"], "pretrain_updates is too small"),
        ("traces", ["algo.estimator.weight_decay=nan"], "weight_decay is too small"),
        ("ppo", ["rollout.num_envs=2", "rollout.num_env_runners=3"], "more env runners than environments"),
        ("ppo", ["rollout.num_envs=999", "rollout.num_env_runners=999"], "more workers than CPUs"),
        ("ppo", ["rollout.num_env_runners=-1"], "rollout.num_env_runners must be at least 0"),
        ("ppo", ["rollout.steps_per_env=99", "env.horizon=100"], "no episode would ever be whole"),
        ("ppo", ["rollout.env_steps=0"], "rollout.env_steps must be at least 1"),
        ("ppo", ["rollout.timeout_s=0"], "rollout.timeout_s must be more than 0"),
        ("ppo", ["rollout.max_restarts=-1"], "rollout.max_restarts must be at least 0"),
        ("ppo", ["learner.minibatch_steps=4001"], "a minibatch must fit into an iteration"),
        ("ppo", ["learner.minibatch_steps=0"], "a minibatch must fit into an iteration"),
        ("ppo", ["learner.lr=-1e-3"], "learner.lr must be at least 0"),
        ("ppo", ["learner.gamma=1.01"], "learner.gamma must lie in [0, 1]"),
        ("ppo", ["learner.epochs=0"], "learner.epochs must be at least 1"),
        ("ppo", ["learner.hidden_sizes=[]"], "at least one layer"),
        ("ppo", ["learner.activation=gelu"], "unknown activation"),
        ("ppo", ["learner.log_std_min=0.5"], "between the limits of its spread"),
        ("ppo", ["learner.lr=nan"], "learner.lr must be at least 0"),
        ("ppo", ["learner.clip=0"], "learner.clip must be more than 0"),
        ("ppo", ["env.horizon=0"], "env.horizon must be at least one step"),
        ("ppo", ["run.max_steps=0"], "run.max_steps is too small"),
    ],
)
def test_settings_that_cannot_work(launch: Launch, algo: str, arguments: list[str], message: str) -> None:
    code, said = launch(f"algo={algo}", *arguments, "dry=true")
    assert code == 2
    assert message in said


def test_nan_of_an_environment(
    ray: Any, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_envs.Faulty, "steps", 0)
    (tmp_path / "armed").write_text("another process")
    fault = faulty("blank", tmp_path / "armed", at=200 + 4 * 7 + 3)  # four environments take turns
    code, said = launch("algo=traces", *SMALL, *fault, "run.name=mine")
    assert code == 2
    assert "rewards at step 7 of environment 2, iteration 1" in said
    assert "given:   'nan'" in said
    assert "continue with: python launch/train.py resume=mine" in said
    run = Run.open("mine", tmp_path / "runs")
    found = run.latest()
    assert found is not None
    assert found[0] == 1, "the iteration before it"
    assert run.status is not None
    assert (run.status["status"], run.status["step"]) == ("failed", 1)
    assert "rewards at step 7 of environment 2" in (run.path / "report.html").read_text()


def test_a_disk_that_fills_up(
    ray: Any, launch: Launch, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there stays; with room again the run ends as one that never lacked it."""
    monkeypatch.setattr(preflight, "RUN_GIB", 0.0)
    often = [*SMALL, "run.checkpoint_every=1", "rollout.env_steps=800"]
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (1024 - 300) * 1024)
    code, said = launch("algo=ppo", *often, "run.name=mine", f"run.dir={small_disk}")
    assert code == 2
    assert "Cannot write the checkpoint of step" in said
    assert "the disk is full" in said
    assert f"resume={small_disk / 'mine'}" in said
    run = Run.open(small_disk / "mine")
    found = run.latest()
    assert found is not None
    assert 1 <= found[0] < 4
    run.close()
    ballast.unlink()
    assert_same(start("ppo", tmp_path, *often, name="whole"), resume(run))


# --- checkpoints


@pytest.fixture(scope="module")
def trained(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two of four iterations, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    return start("ppo_lag", folder, "rollout.env_steps=800", "run.checkpoint_every=1", "run.max_steps=2")


@pytest.fixture
def half(trained: Run, tmp_path: Path) -> Path:
    """The run directory of `trained`, as a copy that may be damaged."""
    return Path(shutil.copytree(trained.path, tmp_path / "runs" / "half"))


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_used(
    launch: Launch, half: Path, tmp_path: Path
) -> None:
    arrays = newest(half) / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-100])
    code, said = launch("resume=half", "run.max_steps=4", "run.display=plain")
    assert code == 0
    assert "step-000000002/arrays.safetensors is truncated" in said
    assert "Using step-000000001, the one before it" in said
    assert (half / "checkpoints" / "unused-step-000000002").is_dir()
    whole = start("ppo_lag", tmp_path, "rollout.env_steps=800", "run.checkpoint_every=1", name="whole")
    run = Run.open(half)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert_same(whole, run)
    run.close()


def test_no_whole_checkpoint_is_left(launch: Launch, half: Path) -> None:
    for folder in (half / "checkpoints").glob("step-*"):
        state = folder / "state.json"
        state.write_bytes(state.read_bytes().replace(b"0", b"1", 1))
    code, said = launch("resume=half", "run.max_steps=4")
    assert code == 2
    assert "No whole checkpoint is left" in said
    assert said.count("state.json is damaged: its SHA-256 is not the one in the manifest") == 2
    assert "start over" not in said


def test_a_checkpoint_of_another_program(launch: Launch, half: Path) -> None:
    for folder in (half / "checkpoints").glob("step-*"):
        (folder / "manifest.json").write_text(json.dumps({"format": "theirs", "version": 3}))
    code, said = launch("resume=half", "run.max_steps=4")
    assert code == 2
    assert "manifest.json is of another program" in said


@pytest.mark.parametrize(
    ("algo", "settings", "why"),
    [
        ("ppo_lag", ["learner.hidden_sizes=[8]"], "size mismatch"),
        ("ppo_lag", ["env=safety-gym", "env.id=SafetySwimmerVelocity-v1", "env.cost=null"], "size mismatch"),
        ("ppo", [], "cost_critic"),
        ("traces", ["algo.memory_in_policy=false", "algo.slice_steps=5"], "'recent'"),
    ],
)
def test_a_checkpoint_of_another_run(
    launch: Launch, half: Path, tmp_path: Path, algo: str, settings: list[str], why: str
) -> None:
    other = start(algo, tmp_path, *settings, "rollout.env_steps=400", name="other")
    shutil.rmtree(half / "checkpoints")
    shutil.copytree(other.path / "checkpoints", half / "checkpoints")
    code, said = launch("resume=half", "run.max_steps=4")
    assert code == 2
    assert "the checkpoint was written with another environment, network or algorithm" in said
    assert why in said
    assert "a checkpoint of algo=ppo_lag on tests.trainers.toy_envs:Throttle-v0" in said
