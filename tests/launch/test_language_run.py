"""Language runs as a user starts them: two phases, a signal, resuming, what lies in the folder afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import CHECKOUT, Command
from tests.trainers.test_report import Page

pytest.importorskip("trl", reason="needs the extra 'language'")
SMALL = [
    "model.tiny_warmup_steps=0",
    "rollout.num_workers=0",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=12",
    "learner.samples_per_device_batch=8",
    "learner.samples_per_step=8",
]


@pytest.mark.slow
def test_two_phases_leave_models_reports_and_samples(command: Command, tmp_path: Path) -> None:
    cache = {"SEEDBED_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    out = command("train", "phases=[sft,grpo]", *SMALL, "learner.steps=3", "run.name=both", **cache)
    assert out.returncode == 0, out.stderr
    folder = tmp_path / "runs" / "both"
    assert sorted(path.name for path in folder.iterdir()) == ["1-sft", "2-grpo", "phases.json"]
    first, second = folder / "1-sft", folder / "2-grpo"
    assert json.loads((second / "config.json").read_text())["model"]["name"] == "runs/both/1-sft/model"
    for run in (first, second):
        assert json.loads((run / "status.json").read_text())["status"] == "finished"
        assert 0 <= json.loads((run / "evaluation.json").read_text())["greedy_accuracy"]["mean"] <= 1
        assert (run / "model" / "model.safetensors").is_file()
    assert "from the first batch, before any step:\n  reward " in out.stdout
    samples = [json.loads(line) for line in (second / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 1, 2}
    page = Page((second / "report.html").read_text("utf-8"))
    assert page.open == []
    for part in ("greedy accuracy", "pass at k 8", "32 prompts", samples[-1]["completion"]):
        assert part in page.text
    again = command("train", "resume=both", **cache)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("is finished: 3 of 3 steps") == 2


@pytest.mark.slow
def test_a_signal_then_resume(command: Command, tmp_path: Path) -> None:
    environ = os.environ | {"SEEDBED_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, str(CHECKOUT / "launch" / "train.py"), "algo=grpo", *SMALL, "learner.steps=400"]
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    run = subprocess.Popen(
        [*line, "run.name=mine"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 143
    assert "stopped by SIGTERM. continue with: python launch/train.py resume=mine" in said
    done = json.loads((metrics.parent / "status.json").read_text())["step"]
    assert 2 <= done < 400
    cache = {"SEEDBED_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    out = command("train", "resume=mine", f"run.max_steps={done + 2}", **cache)
    assert out.returncode == 0, out.stderr
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, done + 3))
    steps = [json.loads(row)["step"] for row in (metrics.parent / "samples.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert set(steps) - {done + 2} == set(range(done + 2)), "none left out; one may be drawn ahead"
    assert all(steps.count(step) == 4 for step in steps), "no batch twice"
    out = command("evaluate", "run=mine", "episodes=5", **cache)
    assert out.returncode == 0, out.stderr
    assert "5 prompts of chained_arithmetic" in out.stdout
