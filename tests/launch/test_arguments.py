"""What a user types: rewritten when it is meant well, refused with the nearest name when it is not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from envs.errors import UserError
from launch.arguments import read, read_into
from trainers.control import RolloutConfig


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        read(argv)
    return str(caught.value)


def test_an_alias_becomes_the_name() -> None:
    assert read(["algo=tracess", "env=safety-gym"]).argv == ["algo=traces", "env=safety-gym"]
    assert read(["algo=tracess,ppo", "-m"]).argv == ["-m", "algo=traces,ppo"]


def test_flags_go_first_and_settings_keep_their_order() -> None:
    args = read(["run.seed=3", "--cfg", "job", "algo=ppo", "learner.lr=1e-4"])
    assert args.argv == ["--cfg", "job", "algo=ppo", "run.seed=3", "learner.lr=1e-4"]
    assert args.given == {"run.seed": "3", "algo": "ppo", "learner.lr": "1e-4"}


def test_env_options_take_any_key() -> None:
    args = read(["algo=ppo", "env.options.terminate_when_unhealthy=false"])
    assert args.argv == ["algo=ppo", "++env.options.terminate_when_unhealthy=false"]
    args = read(["algo=ppo", "env.options={terminate_when_unhealthy:false}"])
    assert args.argv == ["algo=ppo", "++env.options={terminate_when_unhealthy:false}"]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["algo=pp"], ["unknown algo 'pp'", "traces, traces_ct, tracess", "fix:     algo=ppo"]),
        (["env=safetygym"], ["unknown env 'safetygym'", "gym, safety-gym", "env=safety-gym"]),
        (["algo=ppo", "size=huge"], ["unknown size 'huge'", "default, long, paper"]),
        (["algo=ppo", "lr=3e-4"], ["unknown setting 'lr'", "learner.lr", "fix:     learner.lr=3e-4"]),
        (["algo=ppo", "learner.lrr=1"], ["'learner.lrr'", "nearest: learner.lr,"]),
        (["algo=ppo_lag", "algo.multiplier.lrr=1"], ["'algo.multiplier.lrr'", "algo.multiplier.lr"]),
        (["algo=ppo", "+learner.new=1"], ["unknown setting 'learner.new'"]),
        (["alg=ppo"], ["unknown setting 'alg'", "nearest: algo,"]),
        (["algo=ppo", "algo.name=x"], ["unknown setting 'algo.name'"]),
        (["algo=ppo", "algorithm.class_path=x.Y"], ["unknown setting 'algorithm.class_path'"]),
        (["algo=ppo", "learner={lr:1,foo:2}"], ["'foo'", "LearnerConfig"]),
        (["algo=ppo", "~learner.lr"], ["can be changed, not removed", "learner.lr=<value>"]),
        (["algo=ppo", "dry"], ["'dry' is not of the form key=value", "dry=true"]),
        (["ppo"], ["'ppo' is not of the form key=value", "algo=ppo"]),
        (["algo=ppo", "--dry=true"], ["--dry=true", "without dashes"]),
        (["algo=ppo", "run.name=a(b"], ["'run.name=a(b' can't be read", "quote"]),
        (["algo=ppo", "run.seed=1,2"], ["run.seed was given several values", "add -m", "run.seed=[1,2]"]),
        (["algo=ppo", "resume=a", "-m"], ["one run is resumed at a time"]),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], parts: list[str]) -> None:
    message = refusal(*argv)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        (
            "rollout.env_steps=abc",
            ["rollout.env_steps", "'abc'", f"a whole number, for example {RolloutConfig().env_steps}"],
        ),
        ("rollout.env_steps=1e6", ["a whole number", "fix:     rollout.env_steps=1000000"]),
        ("learner.lr=null", ["learner.lr", "'null'", "a number, for example"]),
        ("learner.hidden_sizes=[64,x]", ["learner.hidden_sizes", "a list, for example [64, 64]"]),
        ("learner.normalize_obs=maybe", ["true or false, for example true"]),
        ("run.max_steps=x", ["a whole number or null, for example null"]),
        ("dry=maybe", ["dry", "true or false, for example false"]),
        ("run.seed=", ["run.seed", "a whole number, for example 0"]),
    ],
)
def test_a_wrong_type_is_refused(setting: str, parts: list[str]) -> None:
    message = refusal("algo=ppo", setting)
    for part in parts:
        assert part in message, message


def test_types_are_checked_for_every_value_of_a_sweep() -> None:
    assert read(["algo=ppo", "-m", "run.seed=range(1,4)"]).argv == ["-m", "algo=ppo", "run.seed=range(1,4)"]
    assert "'x'" in refusal("algo=ppo", "-m", "run.seed=1,x")
    assert "'algo.window_episodes'" in refusal("algo=ppo_lag,ppo", "-m", "algo.window_episodes=3")


def write_run(folder: Path, config: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_resumed_run_brings_its_own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"algo": {"name": "ppo_lag"}, "env": {"kind": "gym"}, "size": "paper"}
    write_run(tmp_path / "runs" / "mine", config)
    assert read(["resume=mine"]).argv == ["algo=ppo_lag", "env=gym", "size=paper", "resume=mine"]
    assert read(["resume=mine", "algo=ppo"]).argv[0] == "algo=ppo"  # refused later, with both values


def test_resuming_needs_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "cheetah", {"who": "somebody else"})
    assert "cheetah" in refusal("resume=cheeta")
    assert "launch/train.py did not write it" in refusal("resume=cheetah")


@dataclass(kw_only=True)
class Small:
    run: str | None = None
    episodes: int = 100


def test_a_command_without_groups() -> None:
    assert read_into(Small, ["run=a", "episodes=3"]) == Small(run="a", episodes=3)
    for argv, part in ((["episode=3"], "episodes=3"), (["episodes=x"], "a whole number, for example 100")):
        with pytest.raises(UserError, match=part):
            read_into(Small, argv)
