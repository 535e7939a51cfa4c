"""SFT: it learns, is deterministic, resumes bit for bit, and survives the loss of a worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.trainers.control_runs import descendants, wait_for
from tests.trainers.language_runs import resume, settings, start
from tests.trainers.tiny_language import differences, newest
from trainers.metrics import read_metrics
from trainers.tiny_model import greedy_accuracy


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))


def numbers(run: Any) -> list[dict[str, Any]]:
    """The metrics, without the clock."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(run.path)]


def test_it_learns_to_add(tmp_path: Path) -> None:
    """From random weights to right answers on prompts that were held out, read from the run's own output."""
    from envs.text_tasks import make_task

    run = start("sft", tmp_path, "learner.steps=300", "learner.lr=3e-3")
    rows = read_metrics(run.path)
    assert rows[0]["loss"] > 4  # ln 114, the size of the vocabulary, is 4.7
    task = make_task(settings("sft", tmp_path)[0].env)
    model = transformers.AutoModelForCausalLM.from_pretrained(run.path / "model")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(run.path / "model", padding_side="left")
    assert greedy_accuracy(model, tokenizer, task, 100) > 0.8  # measured: 0.95


SHORT = ("learner.steps=8", "learner.samples_per_device_batch=16", "run.checkpoint_every=3")


def test_it_is_deterministic_and_its_seed_counts(tmp_path: Path) -> None:
    one, two = (start("sft", tmp_path, *SHORT, name=name) for name in ("one", "two"))
    assert numbers(one) == numbers(two)
    assert differences(newest(one), newest(two)) == []
    other = start("sft", tmp_path, *SHORT, "run.seed=1", name="other")
    assert numbers(other) != numbers(one)


@pytest.mark.parametrize("step", [1, 4, 7])
def test_it_resumes_bit_for_bit(step: int, tmp_path: Path) -> None:
    """Broken twice: after `step`, and at the first step after that."""
    whole = start("sft", tmp_path, *SHORT, name="whole")
    broken = start("sft", tmp_path, *SHORT, f"run.max_steps={step}", name="broken")
    assert len(numbers(broken)) == step
    resume(broken, max_steps=step + 1)
    again = resume(broken, max_steps=None)
    assert numbers(again) == numbers(whole)
    assert differences(newest(whole), newest(again)) == []


@pytest.mark.slow
def test_it_survives_the_loss_of_a_worker(ray: Any, tmp_path: Path) -> None:
    """One of two processes is killed from outside; the numbers are those of the run that was left alone."""
    line = ("learner.steps=40", "learner.num_workers=2", "learner.samples_per_device_batch=16")
    whole = start("sft", tmp_path, *line, "run.checkpoint_every=5", name="whole")
    metrics = tmp_path / "killed" / "metrics.jsonl"

    def kill() -> None:
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 7, 300, "no step 7")
        os.kill(next(learner_processes()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    killed = start("sft", tmp_path, *line, "run.checkpoint_every=5", name="killed")
    thread.join()
    assert "a learner worker died" in (killed.path / "events.log").read_text()
    assert numbers(killed) == numbers(whole)
    assert differences(newest(whole), newest(killed)) == []


def learner_processes() -> Iterator[int]:
    """Ray Train's workers among the processes of this test."""
    yield from (pid for pid, line in descendants(os.getpid()).items() if "TrainWorker" in line)
