"""launch/train.py: what it prints, what it leaves alone, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.errors import UserError
from launch import config, train
from tests.launch.conftest import CHECKOUT, Command
from trainers.config import TrainConfig, typed
from trainers.control import LearnerConfig
from trainers.run import Run


def test_dry_prints_everything_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    settings = [
        "run.seed=3",
        "size=long",
        "env.horizon=500",
        "rollout.env_steps=96001",
        "rollout.num_envs=16",
    ]
    out = command("train", "algo=ppo_lag", *settings, "dry=true")
    assert out.returncode == 0, out.stderr
    for part in (
        "seed: 3",
        "size: long",
        "horizon: 500",
        "class_path: algos.ppo_lag.PPOLag",
        "13 iterations x 16 envs x 500 steps = 104,000 env steps",
        "NOTE: episodes are cut to 500 steps; the task's own horizon is 1000",
        "cpus: ",
        "ray 2.",
        "nothing was started and nothing written",
    ):
        assert part in out.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_sentence_that_users_type(command: Command) -> None:
    out = command("train", "algo=tracess", "env=safety-gym", "dry=true")
    assert out.returncode == 0, out.stderr
    assert "class_path: algos.traces.Traces" in out.stdout
    assert "id: SafetyHalfCheetahVelocity-v1" in out.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["algo=pro"], "unknown algo 'pro'"),
        (["algo=ppo", "lr=1"], "learner.lr"),
        (["algo=ppo", "env.id=SafetyHoperVelocity-v1"], "SafetyHopperVelocity-v1"),
        (["algo=ppo_lag", "env=gym"], "this environment has none"),
        (["algo=ppo_lag", "algo.budget=-1"], "budget cannot be negative"),
        (["algo=ppo_lag", "algo.multiplier.kind=pi"], "unknown kind of multiplier"),
        (["algo=ppo", "rollout.num_envs=5000", "rollout.num_env_runners=5000"], "more workers than CPUs"),
        (["algo=ppo", "run.name=a/b"], "run.name"),
        (["resume=nothing"], "There is no run 'nothing'"),
        (["algo=ppo", "--frobnicate"], "without dashes"),
    ],
)
def test_bad_input_is_told_without_a_traceback(
    arguments: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    try:
        code = train.main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2
    assert part in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_bad_command_line_in_a_process(command: Command) -> None:
    out = command("train", "algo=ppo", "algo.budget=-1")
    assert out.returncode == 2
    assert out.stdout == ""
    assert out.stderr.startswith("a cost budget cannot be negative")


def test_help_shows_choices_and_settings(command: Command) -> None:
    out = command("train", "--help", "algo=ppo")
    assert out.returncode == 0, out.stderr
    for part in (
        "size: default, long, paper",
        "env: chained-arithmetic, countdown, dataset, gym, reasoning-gym, safety-gym, sudoku4",
        "recipe/ppo: long",
        f"critic_lr: {LearnerConfig().critic_lr}",
        "resume=<run>",
    ):
        assert part in out.stdout
    assert "schema" not in out.stdout


def test_a_sweep_runs_every_combination(command: Command, tmp_path: Path) -> None:
    out = command("train", "-m", "algo=ppo,ppo_lag", "run.seed=1,2", "algo.budget=7", "dry=true")
    assert out.returncode == 0, out.stderr
    assert [line.strip() for line in out.stdout.splitlines() if line.startswith("  seed:")] == [
        "seed: 1",
        "seed: 2",
    ] * 2
    assert out.stdout.count("class_path: algos.ppo_lag.PPOLag") == 2
    assert out.stdout.count("budget: 7.0") == 4
    assert list(tmp_path.iterdir()) == []


# --- the search path and what is loaded --------------------------------------------------------------------


def inspect(code: str, *arguments: str, cwd: Path, **variables: str) -> str:
    """The output of `code`, run in the same process after launch/train.py has ended."""
    line = [sys.executable, "-i", str(CHECKOUT / "launch" / "train.py"), *arguments]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    out = subprocess.run(line, input=code, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120)
    return out.stdout.splitlines()[-1]


def test_the_checkout_is_first_and_launch_is_off_the_search_path(tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("raise ImportError('the wrong envs')")
    code = "import sys, envs, importlib.util; print([sys.path[0], envs.__file__, "
    code += "[p for p in sys.path if p.endswith('launch')], importlib.util.find_spec('evaluate')])\n"
    found = inspect(code, "algo=ppo", "dry=true", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert found == str([str(CHECKOUT), str(CHECKOUT / "envs" / "__init__.py"), [], None])


def test_dry_loads_no_simulator_torch_or_ray(tmp_path: Path) -> None:
    code = "import sys; print(sorted({'torch', 'ray', 'safety_gymnasium', 'mujoco'} & set(sys.modules)))\n"
    assert inspect(code, "algo=ppo_lag", "dry=true", cwd=tmp_path) == "[]"


def test_one_thread_unless_told_otherwise(tmp_path: Path) -> None:
    code = "import os; print(os.environ['OMP_NUM_THREADS'])\n"
    without = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    line = [sys.executable, "-i", str(CHECKOUT / "launch" / "train.py"), "algo=ppo", "lr=1"]
    for environ, value in ((without, "1"), (without | {"OMP_NUM_THREADS": "3"}, "3")):
        out = subprocess.run(line, input=code, env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert out.stdout.splitlines()[-1] == value


# --- how training ends, with an engine of a few lines ------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    config.register(["ppo"])
    overrides = ["algo=ppo", f"run.dir={tmp_path / 'runs'}", "run.display=off", "run.tensorboard=false"]
    return typed(config.resolved(config.compose(overrides)))


def end(settings: TrainConfig, body, given: dict[str, str] | None = None) -> tuple[int, Run]:
    """The exit code of a run whose training is `body(run)`."""
    run = Run.create(settings.run, {}, "mine")
    engine = SimpleNamespace(train=lambda cfg, run: body(run))
    return train.train(settings, engine, run, given or {}), run


def step(run: Run, number: int = 1) -> None:
    run.report(number, {"env_steps": 10 * number})
    run.checkpoint(number, {"a": number})


def test_done(settings: TrainConfig) -> None:
    code, run = end(settings, step)
    assert code == 0
    assert run.status is not None
    assert (run.status["status"], run.status["step"]) == ("finished", 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal(
    number: signal.Signals, code: int, settings: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(run: Run) -> None:
        os.kill(os.getpid(), number)
        while not run.should_stop():
            pass
        step(run)

    ended, run = end(settings, body, {"run.max_steps": "9", "learner.lr": "3"})
    assert ended == code
    assert run.status is not None
    assert (run.status["status"], run.status["reason"]) == ("stopped", number.name)
    said = capsys.readouterr().out
    assert f"stopped by {number.name}. continue with: " in said
    assert f"python launch/train.py resume={run.path} run.max_steps=9\n" in said


def test_a_second_ctrl_c(settings: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    def body(run: Run) -> None:
        step(run)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    ended, run = end(settings, body)
    assert ended == 130
    assert run.status is not None
    assert run.status["status"] == "stopped"
    assert "continue with: python launch/train.py resume=" in capsys.readouterr().out


def test_rays_answer_to_sigterm_while_it_starts(
    settings: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(run: Run) -> None:
        sys.exit(signal.SIGTERM)

    ended, run = end(settings, body)
    assert ended == 143
    assert run.status is not None
    assert (run.status["status"], run.status["reason"]) == ("stopped", "SIGTERM")
    assert "there is no checkpoint yet; start over with: python launch/train.py" in capsys.readouterr().out


def test_a_users_error_in_the_middle(settings: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    def body(run: Run) -> None:
        step(run)
        run.report(2, {"episode_return": float("nan")})

    ended, run = end(settings, body)
    captured = capsys.readouterr()
    assert ended == 2
    assert "episode_return" in captured.err
    assert "step 2" in captured.err
    assert f"run: {run.path}" in captured.err
    assert "continue with: python launch/train.py resume=" in captured.err
    assert "Traceback" not in captured.err
    assert run.status is not None
    assert run.status["status"] == "failed"


def test_a_users_error_from_another_process(settings: TrainConfig) -> None:
    class FromARunner(Exception):
        cause = UserError("NaN in the observation", given="env 3, step 7")

    def body(run: Run) -> None:
        raise FromARunner("a traceback of forty lines")

    assert end(settings, body)[0] == 2
    assert train.user_error(FromARunner()) is FromARunner.cause
    assert train.user_error(ValueError()) is None


def test_a_bug(settings: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    def body(run: Run) -> None:
        step(run)
        raise ZeroDivisionError("a bug")

    ended, run = end(settings, body)
    captured = capsys.readouterr()
    assert ended == 1
    assert "Traceback" in captured.err
    assert "ZeroDivisionError: a bug" in captured.err
    assert "continue with: " in captured.err
    assert run.status is not None
    assert (run.status["status"], run.status["reason"]) == ("failed", "a bug")


def test_a_run_in_the_usual_place_is_called_by_its_name(
    settings: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings.run.dir = "runs"
    _, run = end(settings, step)
    assert train.how_to_continue(settings, run, {}).endswith("resume=mine")


def test_default_names(settings: TrainConfig) -> None:
    assert train.default_name(settings) == "ppo-HalfCheetahVelocity-seed0"
    settings.env.id, settings.size, settings.run.seed = "mine.envs:Reach-v12", "long", 7
    assert train.default_name(settings) == "ppo-Reach-long-seed7"
    settings.env.id = "ALE/Pong-v5"
    assert train.default_name(settings) == "ppo-Pong-long-seed7"


def test_a_finished_run_says_so(command: Command, tmp_path: Path) -> None:
    saved = config.resolved(config.compose(["algo=ppo", "run.max_steps=3"]))
    folder = tmp_path / "runs" / "done"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(saved | {"run": saved["run"] | {"name": "done"}}))
    (folder / "status.json").write_text(
        json.dumps({"status": "finished", "step": 3, "reason": None, "seconds": 1.0})
    )
    before = sorted(path.name for path in folder.iterdir())
    out = command("train", "resume=done")
    assert out.returncode == 0, out.stderr
    assert "run 'done' is finished: 3 of 3 steps" in out.stdout
    assert "python launch/evaluate.py run=done" in out.stdout
    out = command("train", "resume=done", "run.max_steps=5", "dry=true")
    assert "5 iterations" in out.stdout, out.stderr
    assert sorted(path.name for path in folder.iterdir()) == before
