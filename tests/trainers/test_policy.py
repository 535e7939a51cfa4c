"""The policy's learner against gradients derived without padding or batches; its seams and checks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra 'language'")

import torch
from transformers import LlamaForCausalLM

from envs.errors import UserError
from rollouts.samples import Sample
from tests.trainers import policy_runs
from tests.trainers.policy_runs import ROWS, MadeUpFeed, arguments, learner, made_up
from trainers.learner_mixin import Seams
from trainers.policy import PolicySettings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_runs.make_model(tmp_path_factory.mktemp("tiny"))


def one_step(model: Path, folder: Path, micro: int = 4, **options: Any) -> Any:
    """The learner after one optimizer step."""
    more = {"max_grad_norm": 1e9, **options.pop("more", {})}
    our = learner(model, folder, arguments(folder, micro=micro, max_steps=1, **more), **options)
    our.train()
    return our


def log_probs(policy: Any, sample: Sample) -> torch.Tensor:
    """log pi of every completion token, from one sequence without padding."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits = policy(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1)[torch.arange(len(logits)), ids[0, len(sample.prompt_ids) :]]


def by_hand(model: Path, rows: dict[str, Any], weight: Any = None, skip: tuple[int, ...] = ()) -> Any:
    """Gradient of -1/N sum_i sum_t w_it A_it log pi_it over the rows that are not skipped, N their tokens.

    At ratio 1 that is the gradient of the clipped objective.
    """
    policy = LlamaForCausalLM.from_pretrained(model)
    loss, count = torch.zeros(()), 0
    for i, (sample, credit) in enumerate(zip(rows["samples"], rows["credit"], strict=True)):
        if i in skip:
            continue
        logp = log_probs(policy, sample)
        w = torch.ones(len(logp)) if weight is None else weight(logp.detach(), sample)
        loss = loss - (w * torch.from_numpy(credit) * logp).sum()
        count += len(logp)
    (loss / count).backward()
    return {n: p.grad for n, p in policy.named_parameters()}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=2e-7)
    assert max(float(g.abs().max()) for g in one.values()) > 1e-2


@pytest.mark.parametrize("micro", [8, 4, 2, 1])
def test_any_split_into_micro_batches_gives_the_gradient_by_hand(
    model: Path, tmp_path: Path, micro: int
) -> None:
    our = one_step(model, tmp_path, micro)
    assert_close(by_hand(model, MadeUpFeed().rows(0, 0, 1)), our.gradients[0])


@pytest.mark.parametrize("micro", [8, 2, 1])
def test_failed_samples_leave_numerator_and_denominator(model: Path, tmp_path: Path, micro: int) -> None:
    """With one row a micro-batch some micro-batches are empty: their metrics are left out."""
    failed = (1, 6, 7)
    feed = MadeUpFeed(failed=failed)
    our = one_step(model, tmp_path, micro, feed=feed)
    assert_close(by_hand(model, feed.rows(0, 0, 1), skip=failed), our.gradients[0])
    (step, row) = our.context.client.rows[0]
    assert step == 1
    assert np.isfinite([v for v in row.values() if v is not None]).all()


@pytest.mark.parametrize("loss", ["dapo", "cispo", "vespo", "bnpo", "grpo", "dr_grpo", "sapo", "luspo"])
def test_which_losses_leave_failed_samples_out_of_the_denominator(
    model: Path, tmp_path: Path, loss: str
) -> None:
    """Half of the rows failed and are replaced by others that failed: only the size of the batch counts."""
    whole = one_step(model, tmp_path / "a", 8, more={"loss_type": loss}, feed=MadeUpFeed(failed=(4, 5, 6, 7)))

    class Half(MadeUpFeed):
        def rows(self, number: int, rank: int, world: int) -> dict[str, Any]:
            rows = MadeUpFeed(failed=(4, 5, 6, 7)).rows(number, rank, world)
            return {**rows, "samples": rows["samples"][:4], "credit": rows["credit"][:4]}

    alone = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_grad_norm": 1e9}
    args = arguments(tmp_path / "b", micro=4, max_steps=1, loss_type=loss, **alone)
    half = learner(model, tmp_path / "b", args, feed=Half())
    half.train()
    ratio = [float(half.gradients[0][n].norm() / whole.gradients[0][n].norm()) for n in whole.gradients[0]]
    counts_failed_rows = loss in ("grpo", "dr_grpo", "sapo", "luspo")
    assert ratio == pytest.approx([2.0 if counts_failed_rows else 1.0] * len(ratio), rel=1e-3)


def test_a_batch_that_failed_as_a_whole_moves_nothing(model: Path, tmp_path: Path) -> None:
    our = one_step(model, tmp_path, feed=MadeUpFeed(failed=tuple(range(ROWS))))
    assert all(not g.any() for g in our.gradients[0].values())
    before = LlamaForCausalLM.from_pretrained(model).state_dict()
    assert all(torch.equal(before[n], p) for n, p in our.model.state_dict().items())


def test_the_off_policy_weight_by_hand(model: Path, tmp_path: Path) -> None:
    """min(pi / pi_rollout, cap) of every token is in the gradient; the metrics are its mean and the gap."""
    seen: list[torch.Tensor] = []
    gaps: list[torch.Tensor] = []

    def weight(logp: torch.Tensor, sample: Sample) -> torch.Tensor:
        rollout = torch.from_numpy(sample.logp_rollout)
        seen.append((logp - rollout).exp().clamp(max=1.5))
        gaps.append((logp - rollout).abs())
        return seen[-1]

    hand = by_hand(model, MadeUpFeed().rows(0, 0, 1), weight)
    settings = PolicySettings(correct=True, weight_cap=1.5, exact=False)
    our = one_step(model, tmp_path, 2, settings=settings)
    assert_close(hand, our.gradients[0])
    metrics = our.context.client.rows[0][1]
    assert metrics["off_policy_weight"] == pytest.approx(float(torch.cat(seen).mean()), rel=1e-5)
    assert metrics["engine_mismatch"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-5)
    assert torch.cat(seen).min() < 1 < torch.cat(seen).max() == 1.5


def test_age_and_mismatch_are_two_metrics(model: Path, tmp_path: Path) -> None:
    """Samples of older weights do not count as a mismatch of engines."""

    class Old(MadeUpFeed):
        def rows(self, number: int, rank: int, world: int) -> dict[str, Any]:
            rows = super().rows(number, rank, world)
            for i, sample in enumerate(rows["samples"]):
                sample.version = (0, max(0, number - (i % 2)))
            return rows

    our = learner(model, tmp_path, feed=Old(), settings=PolicySettings(correct=True, exact=False))
    our.train()
    first, second, third = (metrics for _, metrics in our.context.client.rows)
    assert (first["policy_age"], second["policy_age"], third["policy_age"]) == (0.0, 0.5, 0.5)
    assert "off_policy_gap" not in first
    assert {"off_policy_gap", "engine_mismatch"} <= second.keys()
    assert second["off_policy_gap"] != second["engine_mismatch"]


@pytest.mark.parametrize("correct", [True, False])
def test_fresh_samples_with_other_probabilities_are_an_error(
    model: Path, tmp_path: Path, correct: bool
) -> None:
    """The made-up samples were not drawn from this model at all."""
    settings = PolicySettings(correct=correct, exact=True)
    with pytest.raises(UserError, match=r"disagree[\s\S]*step 1: log-probabilities differ by up to"):
        one_step(model, tmp_path, settings=settings)


@pytest.mark.parametrize("iterations", [1, 2])
def test_fresh_ratios_are_one(model: Path, tmp_path: Path, iterations: int) -> None:
    """What the engine says of its own samples is what the learner says, padded and in batches: to 1e-5."""
    policy = LlamaForCausalLM.from_pretrained(model)

    class Honest(MadeUpFeed):
        def rows(self, number: int, rank: int, world: int) -> dict[str, Any]:
            rows = super().rows(number, rank, world)
            for sample in rows["samples"]:
                with torch.no_grad():
                    sample.logp_rollout = log_probs(policy, sample).numpy()
            return rows

    args = arguments(tmp_path, iterations, max_steps=1)
    our = learner(
        model, tmp_path, args, feed=Honest(), settings=PolicySettings(iterations=iterations, correct=True)
    )
    our.train()
    metrics = our.context.client.rows[0][1]
    assert metrics["engine_mismatch"] < 1e-5
    assert metrics["off_policy_weight"] == pytest.approx(1.0, abs=1e-5)


def test_without_a_rate_nothing_moves(model: Path, tmp_path: Path) -> None:
    our = learner(model, tmp_path, arguments(tmp_path, learning_rate=0.0))
    our.train()
    before = LlamaForCausalLM.from_pretrained(model).state_dict()
    assert all(torch.equal(before[n], p) for n, p in our.model.state_dict().items())


def test_a_loss_that_is_not_finite_names_the_sample(model: Path, tmp_path: Path) -> None:
    class Poisoned(MadeUpFeed):
        def rows(self, number: int, rank: int, world: int) -> dict[str, Any]:
            rows = super().rows(number, rank, world)
            if number == 1:
                rows["credit"][6][0] = np.nan
            return rows

    our = learner(model, tmp_path, feed=Poisoned())
    with pytest.raises(
        UserError, match=r"loss became nan at step 2[\s\S]*input 'advantages'[\s\S]*sample 1-1-2"
    ):
        our.train()


# --- seams


def test_a_likelihood_of_its_own_is_used_for_old_reference_and_current(model: Path, tmp_path: Path) -> None:
    """TRL's own log-probabilities through the seam: the same bits; every one of them passed through it."""
    calls = []

    class Mine:
        def log_probs(self, policy: Any, inputs: dict[str, torch.Tensor]) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            keep = inputs["completion_ids"].shape[1]
            calls.append(torch.is_grad_enabled())
            return plain._plain(policy, ids, mask, keep)[:2]

    args = arguments(tmp_path / "a", 2, beta=0.1)
    settings = PolicySettings(iterations=2, exact=False)
    plain = learner(model, tmp_path / "a", args, settings=settings)
    base = type(plain).__mro__[2]  # TRL's trainer below the mixin's learner
    trl_s = super(base, plain)._get_per_token_logps_and_entropies
    plain._plain = lambda *a: trl_s(*a, compute_entropy=torch.is_grad_enabled())
    plain.train()
    seam = learner(
        model,
        tmp_path / "b",
        arguments(tmp_path / "b", 2, beta=0.1),
        settings=settings,
        filled={"likelihood": Mine()},
    )
    seam.train()
    assert all(torch.equal(a, b) for a, b in zip(seam.losses, plain.losses, strict=True))
    # a batch: 2 micro-batches each of old, reference, current; then reference and current of the second step
    assert calls == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2 + calls[10:]
    assert len(calls) == 3 * 10


class Far:
    """A likelihood whose reference is `far` above the policy for every token."""

    def __init__(self, far: float) -> None:
        self.far = far

    def log_probs(self, policy: Any, inputs: dict[str, torch.Tensor]) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits = policy(input_ids=ids, attention_mask=mask, position_ids=places).logits
        keep = inputs["completion_ids"]
        logp = torch.log_softmax(logits[:, -keep.shape[1] - 1 : -1], -1)
        found = logp.gather(2, keep[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1).detach()
        return (found if torch.is_grad_enabled() else found + self.far), entropy


@pytest.mark.parametrize("corrected", [False, True])
def test_a_reference_far_above_the_policy_is_dropped(corrected: bool, model: Path, tmp_path: Path) -> None:
    """Beyond 20 nats there is no KL term: loss and gradient are those of beta = 0."""
    settings, near = PolicySettings(exact=False), {"likelihood": Far(30.0)}
    more = {"beta": 0.1, "use_bias_correction_kl": corrected}
    free = one_step(model, tmp_path / "a", settings=settings, filled=near)
    held = one_step(model, tmp_path / "b", settings=settings, filled=near, more=more)
    assert_close(free.gradients[0], held.gradients[0])
    assert float(sum(held.losses)) == pytest.approx(float(sum(free.losses)), rel=1e-6)


@pytest.mark.parametrize("far", [-30.0, 2.0])
def test_another_reference_is_not(far: float, model: Path, tmp_path: Path) -> None:
    """beta (e^d - d - 1) is in the loss."""
    settings, near = PolicySettings(exact=False), {"likelihood": Far(far)}
    free = one_step(model, tmp_path / "a", settings=settings, filled=near)
    held = one_step(model, tmp_path / "b", settings=settings, filled=near, more={"beta": 0.1})
    added = float(sum(held.losses) - sum(free.losses))
    assert added == pytest.approx(0.1 * (math.exp(far) - far - 1), rel=1e-5)


def test_observe_sees_the_learner_s_weights_before_the_step(model: Path, tmp_path: Path) -> None:
    def observe(policy: Any, samples: list[Sample]) -> dict[str, list[np.ndarray]]:
        assert not policy.training
        assert not torch.is_grad_enabled()
        return {"logp": [log_probs(policy, s).numpy() for s in samples]}

    our = one_step(model, tmp_path, filled={"observe": observe})
    ((_, number, streams),) = [e for e in our.feed.log if e[0] == "observed"]
    before = LlamaForCausalLM.from_pretrained(model)
    assert number == 0
    for sample, seen in zip(made_up(0)[0], streams["logp"], strict=True):
        np.testing.assert_allclose(seen, log_probs(before, sample).detach().numpy(), rtol=1e-5)


def test_compose_chooses_rows_and_the_denominator_follows(model: Path, tmp_path: Path) -> None:
    """Both micro-batches become the first one: the gradient is that of its rows."""
    our = one_step(model, tmp_path, 4, seams=Seams(compose=lambda batches, _: [batches[0], batches[0]]))
    assert_close(by_hand(model, MadeUpFeed().rows(0, 0, 1), skip=(4, 5, 6, 7)), our.gradients[0])


def test_streams_are_padded_with_the_tokens(model: Path, tmp_path: Path) -> None:
    seen = {}

    class Streams(MadeUpFeed):
        def rows(self, number: int, rank: int, world: int) -> dict[str, Any]:
            rows = super().rows(number, rank, world)
            for sample in rows["samples"]:
                t = len(sample.completion_ids)
                sample.streams["hidden"] = np.arange(2.0 * t, dtype=np.float32).reshape(t, 2)
            return rows

    def look(batches: list[Any], _: Any) -> list[Any]:
        seen.update(batches[0])
        return batches

    one_step(model, tmp_path, feed=Streams(), seams=Seams(compose=look))
    length = len(made_up(0)[0][0].completion_ids)
    assert seen["hidden"][0, :length].flatten().tolist() == list(range(2 * length))
    assert not seen["hidden"][0, length:].any()


# --- weights out


def test_weights_are_published_before_every_batch_and_not_after_the_last(model: Path, tmp_path: Path) -> None:
    our = learner(model, tmp_path, arguments(tmp_path, 2), settings=PolicySettings(iterations=2, exact=False))
    our.train()
    said = [("publish", (0, 0), 0), ("publish", (0, 2), 1), ("publish", (0, 4), 2)]
    assert our.feed.log == [("start", 0), *said]
