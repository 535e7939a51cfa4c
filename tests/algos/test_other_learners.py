"""DPO, reward model, pre-training through the launcher's own config: each learns and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainers.language_runs import resume, start
from tests.trainers.tiny_language import differences, newest
from trainers.metrics import read_metrics

LINE = ("learner.samples_per_step=16", "learner.samples_per_device_batch=16", "learner.lr=3e-3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))


def column(run: Any, name: str) -> list[float]:
    return [row[name] for row in read_metrics(run.path)]


def test_dpo_prefers_what_was_chosen(tmp_path: Path) -> None:
    """Chosen and rejected differ in their numbers alone; a wrong chain is told from a right one."""
    run = start("dpo", tmp_path, *LINE, "learner.steps=60", "learner.beta=0.5")
    accuracy = column(run, "rewards/accuracies")
    assert sum(accuracy[-5:]) / 5 > 0.9
    assert column(run, "loss")[0] == pytest.approx(0.6931, abs=1e-3)
    transformers.AutoModelForCausalLM.from_pretrained(run.path / "model")


def test_a_reward_model_scores_what_was_chosen_higher(tmp_path: Path) -> None:
    run = start("reward_model", tmp_path, *LINE, "learner.steps=300")
    assert sum(column(run, "accuracy")[-10:]) / 10 > 0.8  # of 160 pairs; measured 0.90, by chance 0.50
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run.path / "model")
    words = transformers.PreTrainedTokenizerFast.from_pretrained(run.path / "model")
    right, wrong = "7 + 1 = so we get 7 + 1 = 8 ; ans 8", "7 + 1 = so we get 9 + 2 = 11 ; ans 11"
    with torch.no_grad():
        scores = [
            model(**words(text + "<eos>", return_tensors="pt")).logits.item() for text in (right, wrong)
        ]
    assert scores[0] > scores[1]


def test_pretraining_learns_the_text(tmp_path: Path) -> None:
    loss = column(start("pretrain", tmp_path, *LINE, "learner.steps=60"), "loss")
    assert loss[0] > 4
    assert loss[-1] < 2


@pytest.mark.parametrize("algo", ["dpo", "reward_model", "pretrain"])
def test_they_resume_bit_for_bit(algo: str, tmp_path: Path) -> None:
    whole = start(algo, tmp_path, *LINE, "learner.steps=5", name="whole")
    broken = start(algo, tmp_path, *LINE, "learner.steps=5", "run.max_steps=2", name="broken")
    resume(broken, max_steps=3)
    again = resume(broken, max_steps=None)
    assert column(again, "loss") == column(whole, "loss")
    assert differences(newest(whole), newest(again)) == []
