"""launch/evaluate.py: which run, how many episodes, and what it says when that can't be."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import config, evaluate
from tests.launch.conftest import Command
from trainers.run import Run, RunConfig


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run without a checkpoint, in runs/ of the current folder."""
    monkeypatch.chdir(tmp_path)
    config.register(["ppo"])
    return Run.create(RunConfig(name="cheetah"), config.resolved(config.compose(["algo=ppo"])), "")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["which run?", "cheetah", "run=<name>"]),
        (["run=cheeta"], ["There is no run 'cheeta'", "cheetah"]),
        (["run=cheetah", "episodes=0"], ["episodes must be at least 1"]),
        (["run=cheetah", "episodes=many"], ["episodes", "a whole number, for example 100"]),
        (["run=cheetah", "video=perhaps"], ["video", "true or false"]),
        (["run=cheetah", "episode=3"], ["unknown setting 'episode'", "episodes=3"]),
        (["run=cheetah"], ["'cheetah' has no checkpoint yet"]),
    ],
)
def test_bad_input_is_told_without_a_traceback(
    arguments: list[str], parts: list[str], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main(arguments) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert "Traceback" not in said
    assert not (run.path / "evaluation.json").exists()


def test_help(command: Command) -> None:
    out = command("evaluate", "--help")
    assert out.returncode == 0
    assert "run=<name>" in out.stdout
    assert command("evaluate").returncode == 2
