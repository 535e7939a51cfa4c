"""launch/record.py as a user types it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch import record
from rollouts.recorded import read_recording
from tests.evaluators.conftest import untrained_run  # noqa: F401
from tests.evaluators.test_recorder import THROTTLE
from tests.launch.conftest import Command


def test_a_recording(
    untrained_run: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = untrained_run(**THROTTLE, **{"env.options": {"limit": 0.05, "spread": 0.3}, "algo.budget": 11.0})
    out = tmp_path / "a.safetensors"
    given = [f"run={run}", f"out={out}", "episodes=8", "slice_steps=10"]
    assert record.main(given) == 0
    kept = read_recording(out).trajectories
    unsafe = sum(t.labels[-1] == 0 for t in kept)
    assert 0 < unsafe < 8
    said = capsys.readouterr().out
    assert said == f"{out}: 8 trajectories added, {unsafe} of them unsafe at budget 11\n"
    assert record.main(given) == 2
    assert "the file exists already" in capsys.readouterr().err
    assert record.main([*given, "append=true", "budget=1000", "seed=4"]) == 0
    assert "8 trajectories added, 0 of them unsafe at budget 1000" in capsys.readouterr().out
    assert len(read_recording(out).trajectories) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which run?"),
        (["run=x"], "where shall the trajectories be written?"),
        (["run=x", "out=y"], "There is no run 'x'"),
        (["runn=x"], "unknown setting 'runn'"),
        (["run=x", "out=y", "episodes=many"], "a whole number"),
    ],
)
def test_bad_input_is_told_without_a_traceback(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert record.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_help(command: Command) -> None:
    out = command("record", "--help")
    assert out.returncode == 0
    assert "run=<name> out=<file>" in out.stdout
