"""Learners in processes of Ray Train: one gradient from all of them, deaths, signals, ZeRO."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.errors import UserError
from tests.trainers.tiny_language import Recipe, differences, make_model, newest, train
from trainers.metrics import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"), dropout=0.0)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with dropout: every process needs its own generator back after a restart."""
    return make_model(tmp_path_factory.mktemp("dropping"), dropout=0.2)


def events(run: Any) -> str:
    path = run.path / "events.log"
    return path.read_text() if path.exists() else ""


def column(run: Any, name: str) -> list[float]:
    return [row[name] for row in read_metrics(run.path)]


def test_two_workers_average_their_gradients(ray: Any, model: str, tmp_path: Path) -> None:
    """The joined batch in one process gives the same loss, gradient norm and weights.

    Two steps: then an epoch ends, which two processes fill up to whole batches and one does not.
    """
    one = train(Recipe(model=model, steps=2, micro=8), tmp_path, "one")
    two = train(Recipe(model=model, steps=2, micro=4, workers=2), tmp_path, "two")
    for name in ("loss", "grad_norm"):
        assert np.allclose(column(one, name), column(two, name), rtol=1e-5)
    first, second = newest(one)["model"], newest(two)["model"]
    assert max(np.abs(first[name] - second[name]).max() for name in first) < 1e-5
    assert newest(two)["world_size"] == len(newest(two)["rng"]) == 2


@pytest.mark.slow
def test_a_killed_worker_restarts_the_group_and_nothing_is_different(
    ray: Any, dropping: str, tmp_path: Path
) -> None:
    whole = train(Recipe(model=dropping, workers=2), tmp_path, "whole")
    killed = train(Recipe(model=dropping, workers=2, every=2, fault=(0, 5, 1)), tmp_path, "killed")
    assert "a learner worker died: all start again from step 4, attempt 1" in events(killed)
    assert column(killed, "step") == [1, 2, 3, 4, 5, 6]
    assert column(killed, "loss") == column(whole, "loss")
    ignored = {"save_steps"}  # checkpointing twice as often is part of the trainer's state
    found = differences(newest(whole), newest(killed))
    assert [d for d in found if d.rpartition("/")[2] not in ignored] == []
    saved = killed.latest()
    assert saved is not None
    assert saved[1]["attempt"] == 1


@pytest.mark.slow
def test_a_users_error_in_a_worker_ends_the_run_at_once(ray: Any, model: str, tmp_path: Path) -> None:
    """It would only come again: the group is not restarted until its chances are used up."""
    with pytest.raises(UserError, match="step 1 changed no byte of the model"):
        train(Recipe(model=model, workers=2, lr=1e-30, max_restarts=3), tmp_path)
    assert not (tmp_path / "run" / "events.log").exists()


@pytest.mark.slow
def test_workers_that_keep_failing_end_the_run(ray: Any, model: str, tmp_path: Path) -> None:
    def broken(recipe: Recipe, context: Any) -> Any:
        raise RuntimeError("no learner today")

    def dead(recipe: Recipe, context: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    recipe = Recipe(model=model, workers=1, max_restarts=1)
    with pytest.raises(RuntimeError, match=r"more than learner\.max_restarts=1 times[\s\S]*no learner today"):
        train(recipe, tmp_path, make=broken)
    with pytest.raises(UserError, match=r"more than learner\.max_restarts=1 times") as error:
        train(recipe, tmp_path, make=dead)
    assert "the process of rank 0 died" in str(error.value)


@pytest.mark.slow
def test_a_signal_reaches_the_workers(ray: Any, model: str, tmp_path: Path) -> None:
    """The driver's SIGTERM stops both workers after a step, with a checkpoint; the run goes on from there."""
    metrics = tmp_path / "run" / "metrics.jsonl"

    def send() -> None:
        while not metrics.exists() or not metrics.read_bytes():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    stopped = train(Recipe(model=model, workers=2, steps=400, every=1000), tmp_path)
    thread.join()
    assert stopped.status is not None
    assert (stopped.status["status"], stopped.status["reason"]) == ("stopped", "SIGTERM")
    step = stopped.status["step"]
    assert 1 <= step < 400
    resumed = train(Recipe(model=model, workers=2, steps=400, every=1000, stop_after=step + 2), tmp_path)
    assert column(resumed, "step") == list(range(1, step + 3))


@pytest.mark.slow
def test_silence_is_told_with_who_waits_for_whom(ray: Any, model: str, tmp_path: Path) -> None:
    def make(recipe: Recipe, context: Any) -> Any:
        time.sleep(600)

    recipe = Recipe(model=model, workers=1, timeout_s=40)
    with pytest.raises(
        UserError, match=r"no learner worker was heard of for learner\.timeout_s=40 s"
    ) as error:
        train(recipe, tmp_path, make=make)
    assert "the driver waits for the learner workers of attempt 0" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero2", "zero3"])
@pytest.mark.parametrize("lora", [False, True])
def test_zero_gives_the_losses_and_gradient_norms_of_ddp(
    backend: str, lora: bool, ray: Any, model: str, tmp_path: Path
) -> None:
    plain = train(Recipe(model=model, workers=2, lora=lora), tmp_path, "plain")
    zero = train(Recipe(model=model, workers=2, lora=lora, backend=backend), tmp_path, "zero")
    for name in ("loss", "grad_norm"):
        assert np.allclose(column(plain, name), column(zero, name), rtol=1e-6)
    first, second = newest(plain)["model"], newest(zero)["model"]
    assert first.keys() == second.keys()
    assert max(np.abs(first[name] - second[name]).max() for name in first) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero2", "zero3"])
def test_zero_resumes_bit_for_bit_after_a_death(
    backend: str, ray: Any, dropping: str, tmp_path: Path
) -> None:
    whole = train(Recipe(model=dropping, workers=2, backend=backend), tmp_path, "whole")
    killed = train(Recipe(model=dropping, workers=2, backend=backend, fault=(0, 4, 0)), tmp_path, "killed")
    assert "all start again from step 3, attempt 1" in events(killed)
    assert differences(newest(whole), newest(killed)) == []
    with pytest.raises(UserError, match=r"of another learner\.backend"):
        train(Recipe(model=dropping, workers=2, steps=8), tmp_path, "whole")


@pytest.mark.slow
def test_gradients_of_all_workers_reach_the_aggregate_seam(ray: Any, model: str, tmp_path: Path) -> None:
    def mean(gradients: torch.Tensor) -> torch.Tensor:
        assert len(gradients) == 4  # two workers, two micro-batches each
        return gradients.mean(0)

    plain = train(Recipe(model=model, workers=2, micro=2, steps=2), tmp_path, "plain")
    same = train(
        Recipe(model=model, workers=2, micro=2, steps=2, seams={"aggregate": mean}), tmp_path, "same"
    )
    assert np.allclose(column(plain, "grad_norm"), column(same, "grad_norm"), rtol=1e-5)
    first, second = newest(plain)["model"], newest(same)["model"]
    assert max(np.abs(first[name] - second[name]).max() for name in first) < 1e-5
