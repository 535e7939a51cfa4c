"""The likelihoods against enumeration, closed forms and step-by-step decoding, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from algos.d2 import (
    AnyOrder,
    DiffuGRPO,
    Exact,
    StepMerge,
    check_trajectory,
    merged_log_probs,
    segment_bounds,
    state_before,
)
from envs.errors import UserError
from rollouts.decoding import Decoding
from rollouts.masked_diffusion import decode
from rollouts.masked_model import any_order_logits, chosen_log_probs, full_logits
from tests.reference.masked_decoding import Joint, any_order_stepwise, full_stepwise, tiny_llama

V = 9  # 8 tokens and the mask
MASK = V - 1


def trajectory(length: int, each: int, rows: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and a random order with `each` tokens a step (the last step may have fewer)."""
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, MASK, (rows, length)))
    steps = torch.stack([torch.from_numpy(rng.permutation(length) // each) for _ in range(rows)])
    return ids, steps


def inputs_of(ids: torch.Tensor, step: torch.Tensor, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    prompt, mask = torch.zeros(len(prompts), longest, dtype=torch.long), torch.zeros(len(prompts), longest)
    for i, p in enumerate(prompts):
        prompt[i, longest - len(p) :], mask[i, longest - len(p) :] = torch.tensor(p, dtype=torch.long), 1
    return {"prompt_ids": prompt, "prompt_mask": mask.long(), "completion_ids": ids, "decode_step": step}


PROMPTS = [[[], [], []], [[3, 4, 5], [3, 4, 5], [6, 2, 2]], [[3], [4, 5, 6, 7], [2, 2]]]


@pytest.mark.parametrize("prompts", PROMPTS, ids=["none", "equal", "padded"])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_any_order_is_step_by_step_decoding(each: int, prompts: list[list[int]]) -> None:
    model = tiny_llama(V)
    ids, step = trajectory(6, each)
    with torch.no_grad():
        logp, _ = AnyOrder(6 // each, 0.7).log_probs(model, inputs_of(ids, step, prompts))
        for row in range(3):
            truth = any_order_stepwise(model, prompts[row], ids[row].tolist(), step[row].tolist(), MASK, 0.7)
            assert logp[row].tolist() == pytest.approx(truth, abs=1e-10)
    assert float(logp.min()) < -3  # probabilities are far from uniform: an agreement means something


@pytest.mark.parametrize("prompts", PROMPTS[1:], ids=["equal", "padded"])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_the_exact_likelihood_is_step_by_step_decoding(each: int, prompts: list[list[int]]) -> None:
    model = tiny_llama(V)
    ids, step = trajectory(6, each)
    inputs = inputs_of(ids, step, prompts)
    with torch.no_grad():
        logp, _ = Exact(6 // each, 0.7).log_probs(model, inputs)
        assert torch.equal(logp, StepMerge(6 // each, 6 // each, 0.7).log_probs(model, inputs)[0])
        for row in range(3):
            truth = full_stepwise(model, prompts[row], ids[row].tolist(), step[row].tolist(), MASK, 0.7)
            assert logp[row].tolist() == pytest.approx(truth, abs=1e-10)


def test_one_segment_is_the_baseline_without_its_masking() -> None:
    model = tiny_llama(V)
    ids, step = trajectory(6, 1)
    inputs = inputs_of(ids, step, PROMPTS[1])
    with torch.no_grad():
        one = StepMerge(6, 1).log_probs(model, inputs)[0]
        assert torch.equal(one, DiffuGRPO(6, p_mask_prompt=0.0).log_probs(model, inputs)[0])
        masked = DiffuGRPO(6, p_mask_prompt=0.5, seed=1)
        first, again = (masked.log_probs(model, inputs)[0] for _ in range(2))
        assert torch.equal(first, again)  # the same prompt tokens in every optimizer step
        assert not torch.equal(first, one)
        other = DiffuGRPO(6, p_mask_prompt=0.5, seed=2).log_probs(model, inputs)[0]
        assert not torch.equal(first, other)
        truth = full_stepwise(model, PROMPTS[1][0], ids[0].tolist(), [0] * 6, MASK)
    assert one[0].tolist() == pytest.approx(truth, abs=1e-10)


@pytest.mark.parametrize("share", [0.15, 0.6])
def test_the_share_of_masked_prompt_tokens(share: float) -> None:
    """Counted over many completions of one prompt; 4 standard errors."""
    rows, length = 400, 50
    ids = torch.randint(0, MASK, (rows, 4), generator=torch.Generator().manual_seed(0))
    inputs = inputs_of(ids, torch.zeros_like(ids), [[0] * 7 + [2] * length] * rows)
    inputs["prompt_mask"][:, :7] = 0
    seen = DiffuGRPO(1, p_mask_prompt=share)._prompt(inputs, MASK)
    assert not (seen[:, :7] == MASK).any()
    found = float((seen[:, 7:] == MASK).double().mean())
    assert abs(found - share) < 4 * math.sqrt(share * (1 - share) / (rows * length))


@pytest.mark.parametrize("selection", ["top_probability", "random"])
@pytest.mark.parametrize(("each", "any_order"), [(1, False), (2, False), (2, True), (3, True)])
def test_what_the_sampler_notes_is_the_exact_likelihood(each: int, any_order: bool, selection: str) -> None:
    """At the sampling temperature; with and without the key-value cache of the any-order sampler."""
    model, length = tiny_llama(V), 6
    inputs = inputs_of(torch.zeros(3, length), torch.zeros(3, length), PROMPTS[2])
    found = {}
    for cache in (True, False):
        how = Decoding(tokens_per_step=each, selection=selection, any_order=any_order, cache=cache)
        noise = [np.random.default_rng(i) for i in range(3)]
        prompt = inputs["prompt_ids"], inputs["prompt_mask"]
        done = decode(model, *prompt, length=length, decoding=how, temperature=0.6, generators=noise)
        found[cache] = done
        there = {**inputs, "completion_ids": done.ids, "decode_step": done.step}
        steps = length // each
        likelihood: Any = AnyOrder(steps, 0.6) if any_order else Exact(steps, 0.6)
        with torch.no_grad():
            logp = likelihood.log_probs(model, there)[0]
        torch.testing.assert_close(logp, done.logp, atol=1e-10, rtol=0)
        assert MASK not in done.ids
    assert torch.equal(found[True].ids, found[False].ids)
    assert torch.equal(found[True].step, found[False].step)


# --- a tiny vocabulary, all outputs


def table_score(joint: Joint, ids: torch.Tensor) -> Any:
    return lambda state: chosen_log_probs(joint.logits(state, joint.v), ids, 1.0, joint.v)


def enumerated(joint: Joint, order: list[int], segments: int) -> tuple[np.ndarray, np.ndarray]:
    """(log pi, log pi_SM) of every output, one token a step in `order`."""
    ids = torch.tensor(joint.outputs)
    step = torch.tensor(order).argsort().expand_as(ids)
    score = table_score(joint, ids)
    bounds = segment_bounds(joint.l, joint.l), segment_bounds(joint.l, segments)
    exact, merged = (merged_log_probs(score, ids, step, b, joint.v)[0].sum(1).numpy() for b in bounds)
    return exact, merged


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_both_are_distributions_and_their_divergence_is_measured_by_sampling(segments: int) -> None:
    joint = Joint(3, 4, seed=1)
    exact, merged = enumerated(joint, [2, 0, 3, 1], segments)
    assert np.exp(exact).sum() == pytest.approx(1, abs=1e-12)
    assert np.exp(merged).sum() == pytest.approx(1, abs=1e-12)
    assert exact == pytest.approx(np.log(joint.p.ravel()), abs=1e-12)  # the chain rule in any order
    divergence = float((np.exp(exact) * (exact - merged)).sum())
    assert divergence >= -1e-12
    if segments == 4:
        assert divergence == pytest.approx(0, abs=1e-12)
        return
    assert divergence > 0.05
    drawn = np.random.default_rng(0).choice(len(exact), 4000, p=np.exp(exact) / np.exp(exact).sum())
    gaps = (exact - merged)[drawn]
    assert abs(gaps.mean() - divergence) < 3 * gaps.std() / math.sqrt(len(gaps))


def test_the_divergence_of_a_joint_is_a_sum_of_total_correlations() -> None:
    """Finer segmentations are never worse; at most (L - N) log V; all tokens equal reaches it at N = 1."""
    joint, order = Joint(2, 8, seed=3), [5, 2, 7, 0, 1, 6, 3, 4]
    found = []
    for segments in (1, 2, 4, 8):
        exact, merged = enumerated(joint, order, segments)
        found.append(float((np.exp(exact) * (exact - merged)).sum()))
        assert found[-1] == pytest.approx(joint.total_correlation(order, segments), abs=1e-10)
        assert found[-1] <= (8 - segments) * math.log(2)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[1] > 0.05
    equal = Joint(3, 4, seed=0)
    equal.p = np.full_like(equal.p, 1e-300)
    for token in range(3):
        equal.p[(token,) * 4] = 1 / 3
    exact, merged = enumerated(equal, [0, 1, 2, 3], 1)
    assert float((np.exp(exact) * (exact - merged)).sum()) == pytest.approx(3 * math.log(3), abs=1e-9)


def test_the_estimator_s_mean_is_the_gradient_of_the_expected_reward() -> None:
    """All outputs of a real network in one random order that does not depend on theta; N = 1 is biased.

    The estimator is the GRPO loss's gradient at theta = theta_old: sum_l r grad rho^l with rho = pi / pi_old.
    """
    vocabulary, length = 4, 3  # 3 tokens and the mask
    model = tiny_llama(vocabulary, spread=3.0)
    outputs = torch.tensor(list(itertools.product(range(3), repeat=length)))
    reward = torch.from_numpy(np.random.default_rng(5).normal(size=len(outputs)))
    step = torch.tensor([1, 2, 0]).expand_as(outputs)
    inputs = inputs_of(outputs, step, [[1, 2]] * len(outputs))

    def gradient(value: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
        return torch.cat([g.reshape(-1) for g in parts if g is not None])

    exact = Exact(3).log_probs(model, inputs)[0]
    probability = exact.sum(1).exp()
    assert float(probability.detach().sum()) == pytest.approx(1, abs=1e-12)
    truth = gradient((probability * reward).sum())
    cosines = {}
    for segments in (3, 1):
        logp = StepMerge(3, segments).log_probs(model, inputs)[0]
        ratio = (logp - logp.detach()).exp()
        estimate = gradient((probability.detach() * reward * ratio.sum(1)).sum())
        cosines[segments] = float(torch.cosine_similarity(truth, estimate, 0))
        if segments == 3:
            torch.testing.assert_close(estimate, truth, atol=1e-10, rtol=1e-8)
    assert cosines[3] == pytest.approx(1, abs=1e-10)
    assert cosines[1] < 0.97, cosines


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_decoded_later_or_together_changes_no_bit(dtype: torch.dtype) -> None:
    model = tiny_llama(V, dtype)
    ids, step = trajectory(6, 2, rows=1)
    prompt, mask = torch.tensor([[3, 4]]), torch.ones(1, 2)
    with torch.no_grad():
        before = any_order_logits(model, prompt, mask, ids, step, MASK)
        for at in range(6):
            changed = ids.clone()
            changed[0, at] = (ids[0, at] + 1) % MASK
            after = any_order_logits(model, prompt, mask, changed, step, MASK)
            untouched = step[0] <= step[0, at]
            assert torch.equal(after[0, untouched], before[0, untouched])
            if (~untouched).any():
                assert not torch.equal(after[0, ~untouched], before[0, ~untouched])


def test_segments_are_recomputed_and_give_the_gradient_of_all_of_them() -> None:
    """Checkpointed segments against one graph of all, and rows scored together against apart."""
    model = tiny_llama(V)
    ids, step = trajectory(6, 1)
    inputs = inputs_of(ids, step, PROMPTS[1])

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(model.parameters()))])

    weight = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together = gradient((StepMerge(6, 3).log_probs(model, inputs)[0] * weight).sum())
    apart = torch.zeros_like(together)
    for first, end in ((0, 2), (2, 4), (4, 6)):
        state = state_before(ids, step, first, MASK)
        logits = full_logits(model, inputs["prompt_ids"], inputs["prompt_mask"], state)
        logp = chosen_log_probs(logits, ids, 1.0, MASK)[0]
        apart += gradient((logp * weight * ((step >= first) & (step < end))).sum())
    torch.testing.assert_close(together, apart, atol=1e-10, rtol=1e-10)
    rows = torch.zeros_like(together)
    for i in range(3):
        one = {name: value[i : i + 1] for name, value in inputs.items()}
        rows += gradient((StepMerge(6, 3).log_probs(model, one)[0] * weight[i]).sum())
    torch.testing.assert_close(together, rows, atol=1e-10, rtol=1e-10)


# --- input that cannot be scored


@pytest.mark.parametrize(("steps", "segments"), [(6, 4), (6, 7), (6, 0), (6, -1)])
def test_segments_that_do_not_divide_the_steps(steps: int, segments: int) -> None:
    with pytest.raises(UserError, match=r"algo\.segments"):
        StepMerge(steps, segments)


def test_trajectories_that_are_not_whole() -> None:
    ids, step = trajectory(6, 2, rows=2)
    check_trajectory(ids, step, 3, MASK)
    with pytest.raises(ValueError, match=r"decode_step leaves a position undecoded[\s\S]*position 2"):
        check_trajectory(ids, torch.where(torch.arange(6) == 2, -1, step), 3, MASK)
    with pytest.raises(ValueError, match="decode_step must cover every step from 0 to 3"):
        check_trajectory(ids, step, 4, MASK)
    with pytest.raises(ValueError, match="decode_step must cover every step"):
        check_trajectory(ids, step + 1, 3, MASK)
    with pytest.raises(ValueError, match=r"completion_ids holds the mask token[\s\S]*position 4"):
        check_trajectory(torch.where(torch.arange(6) == 4, MASK, ids), step, 3, MASK)
    with pytest.raises(ValueError, match="decode_step must hold one step"):
        check_trajectory(ids, step[:, :5], 3, MASK)


@pytest.mark.parametrize("likelihood", [Exact, AnyOrder])
def test_nothing_was_drawn_at_temperature_0(likelihood: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout\.temperature"):
        likelihood(4, 0.0)


def test_a_model_without_a_mask_token_is_named() -> None:
    model = tiny_llama(V)
    model.config.mask_token_id = None
    ids, step = trajectory(4, 1)
    with pytest.raises(ValueError, match="mask_token_id"):
        Exact(4).log_probs(model, inputs_of(ids, step, PROMPTS[1]))
