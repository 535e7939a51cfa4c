"""Runs of the policy: against TRL's own loop, in other processes, drawn ahead, and with parts that die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra 'language'")

import datasets
import torch
import trl
from trl.trainer import grpo_trainer

from envs.errors import UserError
from envs.text_tasks import make_task
from rollouts.engine_transformers import TransformersEngine
from rollouts.samples import Request
from rollouts.weights import pack
from tests.trainers import policy_faults
from tests.trainers.language_runs import resume, settings, start
from tests.trainers.tiny_language import differences, newest
from trainers.language import sampling
from trainers.metrics import read_metrics
from trainers.models import load_model, load_tokenizer, prepare_model
from trainers.trl_arguments import trl_config

STEPS, PROMPTS, GROUP, MICRO = 6, 2, 4, 4
# The length is a reward that a model of random weights can earn.
TINY = [
    f"learner.steps={STEPS}",
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.samples_per_prompt={GROUP}",
    f"learner.samples_per_device_batch={MICRO}",
    "rollout.max_new_tokens=12",
    "reward.names=[length]",
    "learner.lr=3e-3",
]
HERE, AWAY = "rollout.num_workers=0", "rollout.num_workers=1"
FAULTS = "tests.trainers.policy_faults"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(policy_faults.NOTES, str(tmp_path))
    return tmp_path


def numbers(run: Any) -> list[dict[str, Any]]:
    """The metrics, without the clocks."""
    clocks = {"seconds", "step_time"}
    return [{k: v for k, v in row.items() if k not in clocks} for row in read_metrics(run.path)]


def weights(run: Any) -> dict[str, Any]:
    """The model of the newest checkpoint."""
    return newest(run)["model"]


def same_learning(one: Any, other: Any) -> None:
    """Every number and every bit of what was learned; not which attempt drew a sample."""
    assert numbers(one) == numbers(other)
    trees = [newest(run) for run in (one, other)]
    for tree in trees:
        tree.pop("extra")
    assert differences(*trees) == []


def trl_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's own synchronous loop; only its `generate` is our engine, with TRL's current weights."""
    cfg, _ = settings("grpo", folder, *TINY, HERE)
    task = make_task(cfg.env)
    path = prepare_model(cfg.model, task, say=lambda text: None)
    tokenizer, engine = load_tokenizer(path), TransformersEngine(str(path))
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)
    norms, losses = [], []

    class Loop(trl.GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            step = self.state.global_step
            engine.load_weights(pack(self.model.state_dict(), (0, step)))
            requests = [
                Request(
                    prompt_ids=tokenizer(task.train(step * PROMPTS + j).text)["input_ids"],
                    params=sampling(cfg),
                    n=GROUP,
                    seed=(cfg.run.seed, step, j),
                )
                for j in range(PROMPTS)
            ]
            samples = [s for group in engine.generate(requests) for s in group]
            ids = [s.completion_ids for s in samples]
            return [s.prompt_ids for s in samples], ids, None, [""] * len(ids), None, {}, None, None

        def log(self, logs: dict[str, float], *args: Any) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])
                norms.append(logs["grad_norm"])
            super().log(logs, *args)

    torch.manual_seed(0)
    trainer = Loop(
        model=load_model(path, cfg.model),
        reward_funcs=[lambda completion_ids, **columns: [len(ids) / 64 for ids in completion_ids]],
        args=trl_config(
            "policy",
            cfg.learner.trl,
            output_dir=str(folder / "trl"),
            max_steps=STEPS,
            temperature=cfg.rollout.temperature,
            learning_rate=cfg.learner.lr,
            max_grad_norm=cfg.learner.max_grad_norm,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=PROMPTS * GROUP // MICRO,
            num_generations=GROUP,
            max_completion_length=cfg.rollout.max_new_tokens,
            save_steps=1000,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["7"] * 64}),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.model.state_dict(), losses, norms


def test_a_run_is_trl_s_synchronous_loop_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed, pool, thread and publication change no bit against a loop that has none of them."""
    state, losses, norms = trl_loop(tmp_path, monkeypatch)
    run = start("grpo", tmp_path, *TINY, HERE)
    rows = read_metrics(run.path)
    assert [row["loss"] for row in rows] == losses
    assert [row["grad_norm"] for row in rows] == norms
    assert {row["policy_age"] for row in rows} == {0.0}
    assert max(row["engine_mismatch"] for row in rows) < 1e-5
    assert len({row["reward"] for row in rows}) > 1
    ours = weights(run)
    for name, tensor in state.items():
        assert np.array_equal(np.asarray(ours[name]), tensor.numpy()), name


def test_it_is_deterministic_and_its_seed_counts(tmp_path: Path) -> None:
    one, two = (start("grpo", tmp_path, *TINY, HERE, name=name) for name in ("one", "two"))
    assert differences(newest(one), newest(two)) == []
    assert numbers(one) == numbers(two)
    assert (one.path / "samples.jsonl").read_bytes() == (two.path / "samples.jsonl").read_bytes()
    other = start("grpo", tmp_path, *TINY, HERE, "run.seed=1", name="other")
    assert numbers(other) != numbers(one)


@pytest.mark.parametrize("more", [[HERE], [HERE, "learner.num_iterations=2", "learner.beta=0.1"]], ids=str)
@pytest.mark.parametrize("step", [1, 3])
def test_it_resumes_bit_for_bit(step: int, more: list[str], tmp_path: Path) -> None:
    """Broken twice: after `step` and one step later. With two steps a batch that is once inside a batch."""
    assert_resumes(step, more, tmp_path)


def test_a_reference_that_moves_resumes_bit_for_bit(tmp_path: Path) -> None:
    """It takes over the policy at step 2, is stopped at 3 and takes over again at 4."""
    moving = ["learner.trl.sync_ref_model=true", "learner.trl.ref_model_sync_steps=2"]
    assert_resumes(3, [HERE, "learner.beta=0.1", *moving], tmp_path)


def assert_resumes(step: int, more: list[str], folder: Path) -> None:
    whole = start("grpo", folder, *TINY, *more, name="whole")
    broken = start("grpo", folder, *TINY, *more, f"run.max_steps={step}", name="broken")
    assert len(numbers(broken)) == step
    resume(broken, max_steps=step + 1)
    again = resume(broken, max_steps=None)
    same_learning(whole, again)
    one, other = ([(line["step"], line["id"]) for line in read_samples(run)] for run in (whole, again))
    assert one == other


def read_samples(run: Any) -> list[dict[str, Any]]:
    """What readers see of the samples."""
    import json

    return [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]


def test_without_a_rate_the_policy_is_the_one_it_began_with(tmp_path: Path) -> None:
    """The rewards are those of the first weights, drawn anew; nothing that a step could move has moved."""
    run = start("grpo", tmp_path, *TINY, HERE, "learner.lr=0")
    cfg, _ = settings("grpo", tmp_path, *TINY, HERE)
    task = make_task(cfg.env)
    path = prepare_model(cfg.model, task, say=lambda text: None)
    tokenizer, engine = load_tokenizer(path), TransformersEngine(str(path))
    for step, row in enumerate(read_metrics(run.path)):
        requests = [
            Request(
                prompt_ids=tokenizer(task.train(step * PROMPTS + j).text)["input_ids"],
                params=sampling(cfg),
                n=GROUP,
                seed=(cfg.run.seed, step, j),
            )
            for j in range(PROMPTS)
        ]
        lengths = [len(s.completion_ids) for group in engine.generate(requests) for s in group]
        assert row["completion_length"] == np.mean(lengths)
        assert row["reward"] == pytest.approx(np.mean(lengths) / 64, rel=1e-12)
    before = load_model(path, cfg.model).state_dict()
    assert all(np.array_equal(np.asarray(value), before[name]) for name, value in weights(run).items())


def test_rewarded_length_rises(tmp_path: Path) -> None:
    run = start("grpo", tmp_path, *TINY, HERE, "learner.steps=25", "rollout.max_new_tokens=160")
    length = [row["completion_length"] for row in read_metrics(run.path)]
    assert np.mean(length[-5:]) > np.mean(length[:5]) + 20


# --- input that cannot work, found once a model is there


def test_a_prompt_that_does_not_fit_the_window(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"do not fit the model's window[\s\S]*12 tokens in all"):
        start("grpo", tmp_path, *TINY, HERE, "model.tiny_window=12")


def test_rewards_that_are_equal_for_long_are_warned_of(tmp_path: Path) -> None:
    """A model of random weights never solves the task."""
    run = start("grpo", tmp_path, *TINY, HERE, "reward.names=[exact]", "learner.steps=10")
    events = (run.path / "events.log").read_text()
    assert "equal in the last 10 batches" in events
    assert "rollout.max_new_tokens" in events
    rows = read_metrics(run.path)
    assert {row["frac_reward_zero_std"] for row in rows} == {1.0}
    assert {row["grad_norm"] for row in rows} == {0.0}


# --- in other processes


def test_a_worker_draws_what_the_driver_would(ray: Any, tmp_path: Path) -> None:
    here = start("grpo", tmp_path, *TINY, HERE, name="here")
    away = start("grpo", tmp_path, *TINY, "rollout.num_workers=2", name="away")
    assert differences(newest(here), newest(away)) == []
    assert numbers(here) == numbers(away)


@pytest.mark.parametrize("engine", ["DiesDrawing", "DiesLoading"])
def test_a_worker_that_dies_changes_no_sample(ray: Any, notes: Path, engine: str) -> None:
    whole = start("grpo", notes, *TINY, HERE, name="whole")
    faulty = [f"rollout.engine={FAULTS}:{engine}", f"rollout.options.folder={notes}"]
    killed = start("grpo", notes, *TINY, AWAY, *faulty, name="killed")
    assert (notes / "died").exists()
    same_learning(whole, killed)


def moments(
    folder: Path, staleness: int, callback: str
) -> tuple[Any, list[dict[str, Any]], dict[int, float]]:
    """A run with a worker: what was drawn when, and when the updates were."""
    run = start(
        "grpo",
        folder,
        *TINY,
        AWAY,
        f"rollout.staleness={staleness}",
        f"rollout.engine={FAULTS}:NotingEngine",
        f"rollout.options.folder={folder}",
        f"learner.callbacks=[{FAULTS}.{callback}]",
        name=f"s{staleness}",
    )
    said = policy_faults.notes(folder)
    (folder / "notes.jsonl").unlink()
    draws = [n for n in said if n["what"] == "draw"]
    updates = {n["step"]: n["time"] for n in said if n["what"] == "update"}
    assert {n["pid"] for n in draws}.isdisjoint({n["pid"] for n in said if n["what"] == "update"})
    return run, draws, updates


def test_staleness_is_what_it_says(ray: Any, notes: Path) -> None:
    """0: batch n is drawn after update n, with its weights. 1: drawn while batch n - 1 is learned from."""
    _, draws, updates = moments(notes, 0, "NotesUpdates")
    assert [(d["batch"], d["version"]) for d in draws] == [(n, [0, n]) for n in range(STEPS)]
    assert all(draws[n]["time"] > updates[n - 1] for n in range(1, STEPS))
    run, draws, updates = moments(notes, 1, "WaitsForDraw")
    assert [(d["batch"], d["version"]) for d in draws] == [(n, [0, max(0, n - 1)]) for n in range(STEPS)]
    assert all(draws[n]["time"] < updates[n - 1] for n in range(1, STEPS))
    rows = read_metrics(run.path)
    assert [row["policy_age"] for row in rows] == [0.0] + [1.0] * (STEPS - 1)
    assert rows[0]["engine_mismatch"] < 1e-5
    assert rows[0]["off_policy_weight"] == pytest.approx(1.0, abs=1e-5)
    assert all(row["off_policy_gap"] > 1e-4 for row in rows[1:])


@pytest.mark.parametrize("step", [1, 3])
def test_it_resumes_bit_for_bit_with_a_batch_drawn_ahead(ray: Any, step: int, tmp_path: Path) -> None:
    assert_resumes(step, [AWAY, "rollout.staleness=1"], tmp_path)


LEARNERS = ["learner.num_workers=2", "learner.samples_per_device_batch=2", "run.checkpoint_every=3", AWAY]


@pytest.mark.slow
def test_a_learner_that_dies_goes_on_from_the_checkpoint(ray: Any, notes: Path) -> None:
    """Of two; with a batch drawn ahead, in a Feed that lives on. The numbers are the undisturbed run's."""
    more = [*LEARNERS, "rollout.staleness=1"]
    whole = start("grpo", notes, *TINY, *more, name="whole")
    killed = start("grpo", notes, *TINY, *more, f"algorithm.class_path={FAULTS}.LearnerDies", name="killed")
    assert "a learner worker died: all start again from step 3" in (killed.path / "events.log").read_text()
    same_learning(whole, killed)
    drawn = [line["version"][0] for line in read_samples(killed)]
    assert sorted(set(drawn)) == [0, 1]
    alone = start("grpo", notes, *TINY, AWAY, "rollout.staleness=1", "run.checkpoint_every=3", name="alone")
    for name, value in weights(alone).items():
        np.testing.assert_allclose(np.asarray(value), np.asarray(weights(whole)[name]), atol=1e-4)


@pytest.mark.slow
def test_a_feed_that_dies_ends_the_run_and_the_run_can_be_resumed(ray: Any, notes: Path) -> None:
    more = ["learner.num_workers=1", "run.checkpoint_every=1", AWAY]
    with pytest.raises(UserError, match=r"the Feed died[\s\S]*resume"):
        start("grpo", notes, *TINY, *more, f"algorithm.class_path={FAULTS}.FeedDies", name="dead")
    whole = start("grpo", notes, *TINY, *more, name="whole")
    _, values = settings("grpo", notes, *TINY, *more)
    again = resume_as(notes / "dead", values)
    same_learning(whole, again)


def resume_as(path: Path, values: dict[str, Any]) -> Any:
    """Go on with a run that failed, its cause mended."""
    from trainers.config import typed
    from trainers.language import train
    from trainers.run import Run

    cfg = typed(values)
    with Run.open(path, cfg=cfg.run) as run:
        train(cfg, run)
    return run
