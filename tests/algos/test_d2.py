"""Runs of d2 and of masked fine-tuning: they learn, repeat, resume, survive, refuse what can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra 'language'")

from envs.errors import UserError
from tests.trainers.language_runs import resume, settings, start
from tests.trainers.tiny_language import differences, newest
from trainers.metrics import read_metrics

STEPS = 4
LINE = [
    f"learner.steps={STEPS}",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "learner.samples_per_device_batch=4",
    "rollout.max_new_tokens=12",
    "reward.names=[tests.algos.masked_parts:even]",
    "learner.lr=3e-3",
]
HERE = "rollout.num_workers=0"
ANY_ORDER = ["algo.likelihood=any_order", "model.tiny_objective=any_order", "rollout.options.any_order=true"]
LIKELIHOODS: dict[str, list[str]] = {
    "step_merge": ["algo.segments=3"],
    "exact": ["algo.likelihood=exact", "rollout.options.selection=random"],
    "any_order": ANY_ORDER,
    "diffu_grpo": ["algo.likelihood=diffu_grpo"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def numbers(run: Any) -> list[dict[str, Any]]:
    """The metrics, without the clocks."""
    clocks = {"seconds", "step_time"}
    return [{k: v for k, v in row.items() if k not in clocks} for row in read_metrics(run.path)]


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_it_learns_and_the_exact_ones_are_the_sampler_s(name: str, tmp_path: Path) -> None:
    """A reward that random weights earn half of; exact likelihoods agree with what was drawn."""
    more = [*LIKELIHOODS[name], "learner.steps=30", "rollout.samples_per_prompt=8"]
    run = start("d2", tmp_path, *LINE, *more, HERE)
    rows = read_metrics(run.path)
    reward = [row["reward"] for row in rows]
    assert np.mean(reward[-5:]) > np.mean(reward[:5]) + 0.1
    gap = "engine_mismatch" if name in ("exact", "any_order") else "likelihood_gap"
    found = [row[gap] for row in rows]
    assert max(found) < 1e-4 if gap == "engine_mismatch" else min(found) > 1e-3


def test_it_is_deterministic_and_its_seed_counts(tmp_path: Path) -> None:
    one, two = (start("d2", tmp_path, *LINE, "algo.segments=3", HERE, name=name) for name in ("one", "two"))
    assert numbers(one) == numbers(two)
    assert differences(newest(one), newest(two)) == []
    other = start("d2", tmp_path, *LINE, "algo.segments=3", HERE, "run.seed=1", name="other")
    assert numbers(other) != numbers(one)


@pytest.mark.parametrize("more", [["algo.segments=3"], [*ANY_ORDER, "learner.num_iterations=2"]])
def test_it_resumes_bit_for_bit(more: list[str], tmp_path: Path) -> None:
    whole = start("d2", tmp_path, *LINE, *more, HERE, name="whole")
    broken = start("d2", tmp_path, *LINE, *more, HERE, "run.max_steps=3", name="broken")
    again = resume(broken, max_steps=None)
    assert numbers(again) == numbers(whole)
    assert differences(newest(again), newest(whole)) == []


def test_a_worker_that_dies_changes_no_sample(ray: Any, tmp_path: Path) -> None:
    more = ["algo.segments=3"]
    whole = start("d2", tmp_path, *LINE, *more, HERE, name="whole")
    faulty = ["rollout.engine=tests.algos.masked_parts:DiesDrawing", f"rollout.options.folder={tmp_path}"]
    killed = start("d2", tmp_path, *LINE, *more, *faulty, "rollout.num_workers=1", name="killed")
    assert (tmp_path / "died").exists()
    assert numbers(killed) == numbers(whole)
    trees = [newest(run) for run in (whole, killed)]
    for tree in trees:
        tree.pop("extra")
    assert differences(*trees) == []


SFT = ["rollout.max_new_tokens=12", "learner.samples_per_step=32", "learner.samples_per_device_batch=32"]


@pytest.mark.parametrize("objective", ["masked", "any_order"])
def test_masked_fine_tuning_learns_and_resumes(objective: str, tmp_path: Path) -> None:
    line = [*SFT, f"algo.objective={objective}", "learner.lr=3e-3", "learner.steps=60"]
    whole = start("masked_diffusion_sft", tmp_path, *line, name="whole")
    accuracy = [row["masked_accuracy"] for row in read_metrics(whole.path)]
    assert np.mean(accuracy[-5:]) > np.mean(accuracy[:5]) + 0.2
    broken = start("masked_diffusion_sft", tmp_path, *line, "run.max_steps=31", name="broken")
    again = resume(broken, max_steps=None)
    assert numbers(again) == numbers(whole)
    assert differences(newest(again), newest(whole)) == []


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["algo.likelihood=exat"], ["unknown algo.likelihood", "exact"]),
        (["algo.segments=5"], ["algo.segments must divide", "1, 2, 3, 4, 6, 12"]),
        (["algo.likelihood=any_order"], ["rollout.options.any_order=false", "any_order=true"]),
        (["rollout.options.any_order=true"], ["algo.likelihood=step_merge"]),
        (["rollout.options.steps=5"], ["rollout.options.steps must divide", "5"]),
        (["rollout.options.selection=greedy"], ["rollout.options.selection", "top_probability"]),
        (["rollout.options.block_length=5"], ["rollout.options.block_length must divide"]),
        (["algo.p_mask_prompt=1"], ["algo.p_mask_prompt is a share"]),
        (["algo.likelihood=exact", "algo.p_mask_prompt=0.1"], ["makes a likelihood inexact"]),
        (["rollout.top_p=0.9"], ["rollout.top_p cuts"]),
        (["rollout.staleness=1"], ["rollout.staleness=1", "an exact likelihood"]),
        (["rollout.temperature=0"], ["rollout.temperature"]),
        (["rollout.engine=transformers"], ["can't score what this engine draws", "masked_diffusion"]),
        (["model.tiny_objective=maskd"], ["unknown model.tiny_objective"]),
    ],
)
def test_what_cannot_be_scored_is_refused(more: list[str], parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        settings("d2", tmp_path, *LINE, "algo.segments=3", *more)
    for part in parts:
        assert part in str(caught.value)


def test_an_engine_of_another_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't score what this engine draws"):
        settings("grpo", tmp_path, "rollout.engine=masked_diffusion")


def test_a_model_without_a_mask_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no mask token"):
        start("d2", tmp_path, *LINE, "algo.segments=3", "model.tiny_objective=next_token", HERE)


def test_the_released_rule_warns(tmp_path: Path) -> None:
    cfg, _ = settings("d2", tmp_path, *LINE, "algo.segments=3", "rollout.options.selection=low_confidence")
    assert any("low_confidence" in line and "NOTE" in line for line in cfg.algorithm.describe(cfg))
