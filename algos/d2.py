"""d2: GRPO for masked diffusion language models, with the likelihood of the whole decoding trajectory.

"d2: Improving Reasoning in Diffusion Language Models via Trajectory Likelihood Estimation", arXiv 2509.21474
(fourth version). A completion of L tokens is decoded in T steps; `decode_step` (B, L) says when each was:

    log pi(x_0:T | q) = sum_t sum_l 1[l decoded at step t] log pi(x^l | x_t+1, q)

The first half holds the formulas; `D2` puts one of them into the seam `likelihood`, where TRL's loss takes
the current, old and reference policy's log-probabilities from. "Ours" marks what the sources leave open.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from envs.errors import UserError
from trainers.language import LanguageAlgorithm

ENGINE = "masked_diffusion"
LIKELIHOODS = ("step_merge", "exact", "any_order", "diffu_grpo")
BASELINE_MASKED = 0.15  # of the prompt: diffu-GRPO's, as in the authors' code

Pair = tuple[torch.Tensor, torch.Tensor]  # log-probabilities and entropies, both (B, L)

# ------------------------------------------------------------------------------------------ the formulas


def segment_bounds(steps: int, segments: int) -> list[int]:
    """The N + 1 steps where N equal segments of T steps begin and end.

    Raises UserError unless N is in 1..T and divides T.
    """
    if not 1 <= segments <= steps or steps % segments:
        raise UserError(
            "algo.segments must divide the number of decoding steps",
            given=f"algo.segments={segments}, {steps} steps",
            allowed=", ".join(str(n) for n in range(1, steps + 1) if steps % n == 0),
        )
    return [n * (steps // segments) for n in range(segments + 1)]


def state_before(ids: torch.Tensor, decode_step: torch.Tensor, step: int, mask_id: int) -> torch.Tensor:
    """The completion (B, L) as step `step` (0 .. T-1) finds it: the mask where it is not decoded yet."""
    return torch.where(decode_step >= step, mask_id, ids)


def merged_log_probs(
    score: Callable[[torch.Tensor], Pair],
    ids: torch.Tensor,
    decode_step: torch.Tensor,
    bounds: list[int],
    mask_id: int,
) -> Pair:
    """StepMerge: every token scored from the state at the beginning of its segment (section on StepMerge).

    score: state (B, L) -> log-probabilities of `ids` and entropies there, both (B, L). With gradients each
    segment's forward pass is repeated in the backward pass, so memory does not grow with the segments.
    """
    training = torch.is_grad_enabled() and len(bounds) > 2
    found: list[torch.Tensor] = []
    for first, end in itertools.pairwise(bounds):
        state = state_before(ids, decode_step, first, mask_id)
        pair = checkpoint(score, state, use_reentrant=False) if training else score(state)
        mine = (decode_step >= first) & (decode_step < end)
        found = [torch.where(mine, new, old) for new, old in zip(pair, found or map(torch.zeros_like, pair))]
    return found[0], found[1]


def check_trajectory(ids: torch.Tensor, decode_step: torch.Tensor, steps: int, mask_id: int) -> None:
    """Raise UserError unless `decode_step` (B, L) says of every token at which of the T steps it came."""
    if decode_step.shape != ids.shape:
        raise UserError(
            "decode_step must hold one step a completion token",
            given=tuple(decode_step.shape),
            allowed=str(tuple(ids.shape)),
        )
    if bool((decode_step < 0).any()):
        row, at = torch.nonzero(decode_step < 0)[0].tolist()
        raise UserError(
            "decode_step leaves a position undecoded", given=f"row {row}, position {at}: -1", allowed=">= 0"
        )
    for row, there in enumerate(decode_step.tolist()):
        if set(there) != set(range(steps)):
            raise UserError(
                f"decode_step must cover every step from 0 to {steps - 1}",
                given=f"row {row}: {sorted(set(there))}",
                fix="score with the rollout.options that the completions were drawn with",
            )
    if bool((ids == mask_id).any()):
        row, at = torch.nonzero(ids == mask_id)[0].tolist()
        raise UserError("completion_ids holds the mask token", given=f"row {row}, position {at}: {mask_id}")


class StepMerge:
    """log pi_SM over N equal segments of the T steps: N passes over P + L tokens. N = T is exact.

    p_mask_prompt: share of prompt tokens that the model sees masked (the authors' code: 0.15 in all its
    trainers; ours: 0). Which ones is a function of (seed, prompt, completion), so old, reference and current
    policy see the same in all optimizer steps on a batch (ours; the code draws anew for each).
    """

    def __init__(
        self, steps: int, segments: int, temperature: float = 1.0, p_mask_prompt: float = 0.0, seed: int = 0
    ) -> None:
        check_temperature(temperature)
        self.bounds = segment_bounds(steps, segments)
        self.steps, self.temperature = steps, temperature
        self.p_mask_prompt, self.seed = p_mask_prompt, seed
        self.exact = segments == steps and p_mask_prompt == 0

    def log_probs(self, model: Any, inputs: dict[str, torch.Tensor]) -> Pair:
        """See `LanguageAlgorithm.likelihood`. Reads the prompt, the completion and "decode_step"."""
        from rollouts.masked_model import chosen_log_probs, full_logits, mask_token

        ids, decode_step, mask_id = inputs["completion_ids"], inputs["decode_step"], mask_token(model)
        check_trajectory(ids, decode_step, self.steps, mask_id)
        prompt, prompt_mask = self._prompt(inputs, mask_id), inputs["prompt_mask"]

        def score(state: torch.Tensor) -> Pair:
            logits = full_logits(model, prompt, prompt_mask, state)
            return chosen_log_probs(logits, ids, self.temperature, mask_id)

        return merged_log_probs(score, ids, decode_step, self.bounds, mask_id)

    def _prompt(self, inputs: dict[str, torch.Tensor], mask_id: int) -> torch.Tensor:
        prompt = inputs["prompt_ids"]
        if not self.p_mask_prompt:
            return prompt
        rows = [
            torch.cat([p[m.bool()], c]).cpu().numpy().tobytes()
            for p, m, c in zip(prompt, inputs["prompt_mask"], inputs["completion_ids"])
        ]
        hidden = torch.zeros(prompt.shape, dtype=torch.bool)
        for i, (row, mask) in enumerate(zip(rows, inputs["prompt_mask"].cpu().bool())):
            drawn = np.random.default_rng((self.seed, zlib.crc32(row))).random(int(mask.sum()))
            hidden[i, mask] = torch.from_numpy(drawn < self.p_mask_prompt)
        return prompt.masked_fill(hidden.to(prompt.device), mask_id)


class Exact(StepMerge):
    """The trajectory's own likelihood in T passes."""

    def __init__(self, steps: int, temperature: float = 1.0) -> None:
        super().__init__(steps, steps, temperature)


class DiffuGRPO(StepMerge):
    """Every token from one completely masked completion, the prompt partly masked (the baseline, of d1)."""

    def __init__(
        self, steps: int, temperature: float = 1.0, p_mask_prompt: float = BASELINE_MASKED, seed: int = 0
    ) -> None:
        super().__init__(steps, 1, temperature, p_mask_prompt, seed)


class AnyOrder:
    """log pi in one pass over P + 2L tokens, for models that decode by the any-order rules. Exact."""

    exact = True

    def __init__(self, steps: int, temperature: float = 1.0) -> None:
        check_temperature(temperature)
        self.steps, self.temperature = steps, temperature

    def log_probs(self, model: Any, inputs: dict[str, torch.Tensor]) -> Pair:
        """See `LanguageAlgorithm.likelihood`. Reads the prompt, the completion and "decode_step"."""
        from rollouts.masked_model import any_order_logits, chosen_log_probs, mask_token

        ids, decode_step, mask_id = inputs["completion_ids"], inputs["decode_step"], mask_token(model)
        check_trajectory(ids, decode_step, self.steps, mask_id)
        prompt = inputs["prompt_ids"], inputs["prompt_mask"]
        logits = any_order_logits(model, *prompt, ids, decode_step, mask_id)
        return chosen_log_probs(logits, ids, self.temperature, mask_id)


def check_temperature(temperature: float) -> None:
    """Raise UserError for a temperature at which nothing has a likelihood."""
    if not temperature > 0:
        raise UserError(
            "completions that were not drawn have no likelihood",
            given=f"rollout.temperature={temperature:g}",
            allowed="more than 0",
        )


# ------------------------------------------------------------------------------------------ the algorithm


@dataclass(kw_only=True)
class D2Config:
    """Which likelihood: step_merge in `segments` passes, exact, any_order, or diffu_grpo, the baseline."""

    name: str = "d2"
    likelihood: str = "step_merge"  # step_merge | exact | any_order | diffu_grpo
    segments: int = 8  # N, of step_merge
    p_mask_prompt: float | None = None  # share of the prompt; None: 0, for diffu_grpo 0.15


class D2(LanguageAlgorithm):
    """GRPO over completions of a masked diffusion model.

    The advantage is r minus its group's mean (`reward.scale=none`); the loss is TRL's, summed over learnable
    tokens and divided by their number; KL against the reference is TRL's k3. Scored at the temperature that
    was sampled with (ours; the authors' code scores at 1). Tokens after the first end token are not learned
    from, whenever they were decoded.
    """

    kind = "policy"
    engine_kind = ENGINE
    Config = D2Config

    @classmethod
    def check(cls, cfg: Any) -> None:
        a, r = cfg.algo, cfg.rollout
        if a.likelihood not in LIKELIHOODS:
            raise UserError("unknown algo.likelihood", given=a.likelihood, allowed=LIKELIHOODS)
        check_temperature(r.temperature)
        if a.p_mask_prompt is not None and not 0 <= a.p_mask_prompt < 1:
            raise UserError("algo.p_mask_prompt is a share", given=a.p_mask_prompt, allowed="[0, 1)")
        if a.p_mask_prompt and a.likelihood in ("exact", "any_order"):
            raise UserError(
                "algo.p_mask_prompt makes a likelihood inexact",
                given=f"algo.p_mask_prompt={a.p_mask_prompt} algo.likelihood={a.likelihood}",
                fix="leave it out, or choose step_merge or diffu_grpo",
            )
        decoding, steps = _decoding(cfg)
        if a.likelihood == "step_merge":
            segment_bounds(steps, a.segments)
        if decoding.any_order != (a.likelihood == "any_order"):
            raise UserError(
                "completions must be drawn by the rules that they are scored by",
                given=f"algo.likelihood={a.likelihood} "
                f"rollout.options.any_order={str(decoding.any_order).lower()}",
                allowed="any_order with rollout.options.any_order=true, the others with false",
            )
        for name in ("top_p", "top_k"):
            if getattr(r, name) != {"top_p": 1.0, "top_k": 0}[name]:
                raise UserError(
                    f"rollout.{name} cuts distributions that are scored whole",
                    given=getattr(r, name),
                    fix=f"leave rollout.{name} out",
                )
        if r.staleness and not _likelihood(cfg).exact:
            raise UserError(
                "an inexact likelihood can't be compared with the probabilities of an older policy's sampler",
                given=f"rollout.staleness={r.staleness} algo.likelihood={a.likelihood}",
                fix="set rollout.staleness=0, or an exact likelihood",
            )

    @classmethod
    def describe(cls, cfg: Any) -> list[str]:
        from rollouts.decoding import LOW_CONFIDENCE

        decoding, steps = _decoding(cfg)
        length = cfg.rollout.max_new_tokens
        passes = {"exact": steps, "step_merge": cfg.algo.segments}.get(cfg.algo.likelihood, 1)
        size = 2 * length if cfg.algo.likelihood == "any_order" else length
        lines = [
            f"{length} tokens decoded in {steps} steps ({decoding.selection}); scored by "
            f"{cfg.algo.likelihood}: {passes} pass(es) over the prompt and {size} tokens"
        ]
        return lines + ([f"NOTE: {LOW_CONFIDENCE}"] if decoding.selection == "low_confidence" else [])

    def prepare(self, cfg: Any, tokenizer: Any) -> None:
        """The likelihood, at the temperature and in the steps of the run's sampler."""
        self.likelihood = _likelihood(cfg)


def _decoding(cfg: Any) -> tuple[Any, int]:
    """How the run decodes, and in how many steps."""
    from rollouts.decoding import read_decoding

    decoding, _ = read_decoding(dict(cfg.rollout.options))
    return decoding, len(decoding.plan(cfg.rollout.max_new_tokens))


def _likelihood(cfg: Any) -> Any:
    a, (_, steps), temperature = cfg.algo, _decoding(cfg), cfg.rollout.temperature
    if a.likelihood == "exact":
        return Exact(steps, temperature)
    if a.likelihood == "any_order":
        return AnyOrder(steps, temperature)
    if a.likelihood == "step_merge":
        return StepMerge(steps, a.segments, temperature, a.p_mask_prompt or 0.0, cfg.run.seed)
    masked = BASELINE_MASKED if a.p_mask_prompt is None else a.p_mask_prompt
    return DiffuGRPO(steps, temperature, masked, cfg.run.seed)
