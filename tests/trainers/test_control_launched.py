"""The control engine as users start it: processes of its own, signals, SIGKILL, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.algos.test_traces_run import EARLY
from tests.trainers.control_runs import SMALL, assert_same, descendants, resume, rows, start, wait_for
from trainers.run import Run

CHECKOUT = Path(__file__).resolve().parents[2]
TRAIN = CHECKOUT / "launch" / "train.py"
PLAN = 40
SETTINGS = [*SMALL, *EARLY, f"rollout.env_steps={200 * PLAN}", "run.checkpoint_every=3"]


class Training:
    """launch/train.py in a session of its own, in an empty folder, with an empty home."""

    def __init__(self, folder: Path, *arguments: str):
        self.metrics = folder / "runs" / "mine" / "metrics.jsonl"
        unset = ("PYTHONPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        environ = {k: v for k, v in os.environ.items() if k not in unset} | {"HOME": str(folder / "home")}
        self.process = subprocess.Popen(
            [sys.executable, str(TRAIN), *arguments],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.family: dict[int, str] = {}

    def steps(self) -> list[int]:
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.is_file() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def wait_past(self, step: int) -> None:
        """Until a later step than `step` is reported; notes the processes at that time."""

        def reported() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return bool(self.steps()) and self.steps()[-1] > step

        wait_for(reported, 240, "no further step is reported")
        self.family = descendants(self.process.pid)
        assert any("ControlEnvRunner" in line for line in self.family.values())

    def end(self) -> tuple[int, str]:
        """(exit code, output), once none of its processes is left.

        Ray's two agents of a node notice only after a minute when the driver was killed; they don't count.
        """
        said, _ = self.process.communicate(timeout=120)
        family = [pid for pid, line in self.family.items() if not re.match(r"ray::\w+Agent", line)]

        def left() -> list[str]:
            alive = [pid for pid in family if Path(f"/proc/{pid}").exists()]
            lines = {pid: Path(f"/proc/{pid}/stat").read_text() for pid in alive}
            return [line for line in lines.values() if ") Z " not in line]

        wait_for(lambda: not left(), 20, "processes outlive the driver")
        return self.process.returncode, said


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "home").mkdir()
    started: list[Training] = []

    def make(*arguments: str) -> Training:
        started.append(Training(tmp_path, *arguments))
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def printed_command(said: str) -> list[str]:
    """The arguments of the command that the launcher prints for continuing."""
    found = re.search(r"continue with: python launch/train.py (.*)", said)
    assert found, said
    return shlex.split(found[1])


def assert_stopped(training: Training, code: int, said: str, reason: str) -> None:
    """The last whole iteration is in a checkpoint, and everything says so."""
    assert code == {"SIGINT": 130, "SIGTERM": 143}[reason], said
    assert "Traceback" not in said
    assert printed_command(said) == ["resume=mine", "rollout.num_env_runners=1"]
    run = Run.open(training.metrics.parent)
    found = run.latest()
    assert found is not None
    assert found[0] == training.steps()[-1] < PLAN
    assert run.status is not None
    assert (run.status["status"], run.status["reason"]) == ("stopped", reason)
    assert f"stopped at step {found[0]}" in (run.path / "report.html").read_text()
    assert (run.path / "curves" / "return.png").stat().st_size > 1000


def test_killed_terminated_interrupted_and_then_the_end(ray: Any, training: Any, tmp_path: Path) -> None:
    """What is left after all three is, byte for byte, what a run ends with that nobody disturbed."""
    first = training("algo=tracess", *SETTINGS, "rollout.num_env_runners=1", "run.name=mine")
    first.wait_past(4)
    first.process.kill()
    code, said = first.end()
    assert code == -signal.SIGKILL, said

    second = training("resume=mine", "rollout.num_env_runners=1")
    second.wait_past(first.steps()[-1])
    for process in [*second.family, second.process.pid]:  # as scancel does; Ray's processes first
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    assert_stopped(second, *second.end(), "SIGTERM")

    third = training("resume=mine", "rollout.num_env_runners=1")
    third.wait_past(second.steps()[-1])
    os.killpg(third.process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches Ray's processes too
    assert_stopped(third, *third.end(), "SIGINT")
    assert list((tmp_path / "home").iterdir()) == []

    run = resume(Run.open("mine", tmp_path / "runs"), num_env_runners=0)
    found = run.latest()
    assert found is not None
    assert found[1]["engine"]["attempt"] == 3
    assert found[1]["engine"]["env_steps"] == 200 * PLAN
    assert [row["step"] for row in rows(run)] == list(range(1, PLAN + 1))
    assert_same(start("traces", tmp_path, *SETTINGS, name="undisturbed"), run)


@pytest.mark.slow
def test_rays_gcs_is_killed(training: Any) -> None:
    """Ray itself would end the driver without a word, a minute later."""
    one = training("algo=tracess", *SETTINGS, "rollout.num_env_runners=1", "run.name=mine")
    one.wait_past(4)
    (gcs,) = [pid for pid, line in one.family.items() if "/gcs_server " in line]
    os.kill(gcs, signal.SIGKILL)
    code, said = one.end()
    assert code == 2
    assert f"'gcs_server (process {gcs}) ended with code -9'" in said
    assert "Traceback" not in said
    assert printed_command(said)[0] == "resume=mine"
    run = Run.open(one.metrics.parent)
    found = run.latest()
    assert found is not None
    assert found[0] == one.steps()[-1] < PLAN
    assert run.status is not None
    assert run.status["status"] == "failed"
