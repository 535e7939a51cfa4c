"""Sweeps over Ray: names, commands, what is not repeated, the table; and one for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from evaluators.sweep import write_sweep
from launch import sweep
from tests.launch.conftest import CHECKOUT, Command
from tests.trainers.control_runs import SMALL

JOBS = [
    ("algo=ppo", "run.seed=1", "learner.lr=0.001"),
    ("algo=ppo", "run.seed=2", "learner.lr=0.001"),
    ("algo=traces", "run.seed=1", "learner.lr=0.001"),
    ("algo=traces", "run.seed=2", "learner.lr=0.001"),
]


def test_a_run_is_named_by_what_differs() -> None:
    assert sweep.run_names(JOBS) == [
        "algo-ppo_seed-1",
        "algo-ppo_seed-2",
        "algo-traces_seed-1",
        "algo-traces_seed-2",
    ]
    assert sweep.run_names([("learner.lr=0.001",)]) == ["run"]
    # What a folder's name cannot hold is left out, and names that would then be one are told apart.
    jobs = [("learner.hidden_sizes=[64,64]",), ("learner.hidden_sizes=[6464]",)]
    assert sweep.run_names(jobs) == ["hidden_sizes-6464_0", "hidden_sizes-6464_1"]


def test_what_was_begun_goes_on_and_what_is_done_is_not_repeated(tmp_path: Path) -> None:
    new = sweep.command(tmp_path, "a", JOBS[0])
    assert new[2:] == [*JOBS[0], "run.name=a", f"run.dir={tmp_path}", "run.display=plain"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    assert sweep.command(tmp_path, "a", JOBS[0])[2:] == [
        "resume=a",
        f"run.dir={tmp_path}",
        "run.display=plain",
    ]
    assert not sweep.done(tmp_path / "a")
    (tmp_path / "a" / "status.json").write_text('{"status": "finished"}')
    assert not sweep.done(tmp_path / "a")  # not evaluated yet
    (tmp_path / "a" / "evaluation.json").write_text("{}")
    assert sweep.done(tmp_path / "a")
    (tmp_path / "a" / "status.json").write_text('{"status": "stopped"}')
    assert not sweep.done(tmp_path / "a")


def evaluated(folder: Path, name: str, **means: float) -> None:
    (folder / name).mkdir()
    values: dict[str, Any] = {k: {"mean": v, "ci95": None, "n": 5} for k, v in means.items()}
    values |= {"run": name, "budget": 25.0, "episode_length": {"mean": 50.0, "ci95": None, "n": 5}}
    (folder / name / "evaluation.json").write_text(json.dumps(values))


def test_the_table_by_hand(tmp_path: Path) -> None:
    names = sweep.run_names(JOBS)
    jobs = {n: dict(o.split("=") for o in job) for n, job in zip(names, JOBS, strict=True)}
    (tmp_path / "sweep.json").write_text(json.dumps(jobs))
    evaluated(tmp_path, names[0], episode_return=10.0, episode_cost=4.0)
    evaluated(tmp_path, names[1], episode_return=14.0, episode_cost=4.0)
    evaluated(tmp_path, names[2], episode_return=7.0, episode_cost=1.0)
    rows = write_sweep(tmp_path)
    assert [row["run"] for row in rows] == names[:3]
    # Of 10 and 14: mean 12, deviation 2.83, and the mean's interval 12 +- 12.706 * 2.83 / sqrt(2).
    assert (tmp_path / "table.md").read_text().splitlines() == [
        "| algo | seeds | episode return | episode cost |",
        "|---|---|---|---|",
        "| ppo | 2 | 12 ± 2.8 [-13.41, 37.41] | 4 ± 0 [4, 4] |",
        "| traces | 1 | 7 | 1 |",
        "",
        "1 runs have no evaluation.",
    ]
    assert json.loads((tmp_path / "results.json").read_text())[1]["settings"]["run.seed"] == "2"


@pytest.mark.parametrize(
    ("name", "cpus", "message"),
    [("a/b", 1.0, "the name of one folder"), ("a", 0.0, "a share of a CPU"), ("a", float("nan"), "a share")],
)
def test_settings_that_cannot_work(tmp_path: Path, name: str, cpus: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.sweep(name, tmp_path, JOBS, cpus)


def test_without_evaluations(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"run": {"algo": "ppo"}}))
    assert write_sweep(tmp_path) == []
    assert (tmp_path / "table.md").read_text().endswith("1 runs have no evaluation.\n")


SWEEP = ["-m", "hydra/launcher=ray", "hydra.launcher.name=seeds", "hydra.launcher.cpus_per_run=0.5"]
TINY = [s for s in SMALL if not s.startswith(("run.display", "rollout.env_steps"))]


@pytest.mark.slow
def test_a_sweep_for_real(command: Command, tmp_path: Path) -> None:
    """Two runs at once on one CPU of one cluster; the second time there is nothing to do but the table."""
    given = [*SWEEP, "algo=ppo", "run.seed=1,2", *TINY, "rollout.env_steps=400"]
    out = command("train", *given, PYTHONPATH=str(CHECKOUT))
    assert out.returncode == 0, out.stderr + out.stdout
    runs = tmp_path / "runs" / "seeds"
    assert "2 runs, 0 of them done already" in out.stdout
    assert "| seeds | episode return | episode cost | violation rate |" in out.stdout
    assert all(sweep.done(runs / f"seed-{k}") for k in (1, 2))
    stamps = [json.loads((runs / f"seed-{k}" / "status.json").read_text())["step"] for k in (1, 2)]
    assert stamps == [2, 2]
    again = command("train", *given, PYTHONPATH=str(CHECKOUT))
    assert again.returncode == 0
    assert "2 runs, 2 of them done already" in again.stdout


@pytest.mark.slow
def test_an_interrupted_sweep_leaves_checkpoints_and_no_processes(tmp_path: Path) -> None:
    given = [*SWEEP, "algo=ppo", "run.seed=1,2", *TINY, "rollout.env_steps=40000000"]
    process = subprocess.Popen(
        [sys.executable, str(CHECKOUT / "launch" / "train.py"), *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    runs = tmp_path / "runs" / "seeds"
    try:
        deadline = time.monotonic() + 240
        files = [runs / f"seed-{k}" / "metrics.jsonl" for k in (1, 2)]
        while not all(file.exists() and file.stat().st_size for file in files):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=200)[0]
    finally:
        process.kill()
    assert "the same command goes on where they were" in said
    for k in (1, 2):
        status = json.loads((runs / f"seed-{k}" / "status.json").read_text())
        assert (status["status"], status["reason"]) == ("stopped", "SIGTERM")
        assert any((runs / f"seed-{k}" / "checkpoints").glob("step-*"))
    alive = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
    assert str(runs) not in alive
