"""Engine for masked diffusion models: a completion of fixed length, decoded from all masks in T steps.

Each step chooses positions and draws their tokens from softmax(logits / temperature), never the mask token.
With `top_probability` and `random` the positions do not depend on what is drawn in the step, so the sum of
the log-probabilities that come back is the trajectory's exact likelihood; with `low_confidence` (the rule of
the released samplers of LLaDA and its successors) it is not, see `Decoding`.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from envs.errors import UserError, nearest
from rollouts.decoding import LOW_CONFIDENCE, Decoding, read_decoding
from rollouts.engine_transformers import TransformersEngine
from rollouts.masked_model import (
    any_order_logits,
    ask,
    check_masked_model,
    full_logits,
    log_distribution,
    mask_token,
    true_positions,
    unwrapped,
)
from rollouts.samples import Request, Sample, sample_id

# -------------------------------------------------------------------------------------------- the sampler


class FullPredictor:
    """Logits of masked positions by full visibility: one pass over prompt and state a step."""

    def __init__(self, model: Any, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, mask_id: int) -> None:
        self.model, self.prompt_ids, self.prompt_mask = model, prompt_ids, prompt_mask
        self.mask_id = mask_id

    def __call__(self, ids: torch.Tensor, step: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """(B, m, V) at positions `at` (B, m); ids, step (B, L), step -1 where not decoded."""
        state = torch.where(step < 0, self.mask_id, ids)
        return _rows_at(full_logits(self.model, self.prompt_ids, self.prompt_mask, state), at)


class AnyOrderPredictor(FullPredictor):
    """The same by the any-order rules, without a cache: prompt, clean tokens and twins in every step."""

    def __call__(self, ids: torch.Tensor, step: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """See `FullPredictor`."""
        last = torch.where(step < 0, step.shape[1], step)
        args = (self.model, self.prompt_ids, self.prompt_mask, ids, last, self.mask_id)
        return _rows_at(any_order_logits(*args), at)


class CachedPredictor:
    """The same by the any-order rules, with keys and values of prompt and clean tokens kept.

    A step feeds the tokens that the step before has decoded, and the twins of `at`; the twins' keys and
    values are dropped afterwards.
    """

    def __init__(
        self, model: Any, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, mask_id: int, length: int
    ) -> None:
        self.model, self.mask_id, self.prompt_mask = model, mask_id, prompt_mask.bool()
        self.before = prompt_ids.shape[1]
        positions = true_positions(prompt_mask, length)
        self.positions = positions[:, self.before :]
        self.cache = DynamicCache(config=model.config)
        self.kept, self.next_step = self.before, 0
        eye = torch.eye(self.before, dtype=torch.bool, device=prompt_ids.device)
        sees = self.prompt_mask[:, None, :] | eye
        ask(model, prompt_ids, positions[:, : self.before], sees, 1, self.cache)

    def __call__(self, ids: torch.Tensor, step: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """See `FullPredictor`; steps must come one after the other."""
        rows, twins = at.shape
        newest = (step >= 0) & (step == self.next_step - 1)
        new = torch.nonzero(newest)[:, 1].reshape(rows, -1)  # in order of position
        fresh = new.shape[1]
        tokens = torch.cat([ids.gather(1, new), torch.full_like(at, self.mask_id)], 1)
        places = self.positions.gather(1, torch.cat([new, at], 1))
        size = fresh + twins
        visible = torch.ones(rows, size, self.kept + size, dtype=torch.bool, device=ids.device)
        visible[:, :, : self.before] = self.prompt_mask[:, None, :]
        here = torch.eye(size, dtype=torch.bool, device=ids.device)
        here[:fresh, :fresh] = torch.ones_like(here[:fresh, :fresh]).tril()
        here[fresh:, :fresh] = True
        visible[:, :, self.kept :] = here
        logits = ask(self.model, tokens, places, visible, twins, self.cache)
        self.kept, self.next_step = self.kept + fresh, self.next_step + 1
        self.cache.crop(-twins)
        return logits


def _rows_at(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))


@dataclass(kw_only=True)
class Decoded:
    """What was decoded, all (B, L): tokens, the step 0 .. T-1 of each, and its log-probability."""

    ids: torch.Tensor
    step: torch.Tensor
    logp: torch.Tensor


@torch.no_grad()
def decode(
    model: Any,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    *,
    length: int,
    decoding: Decoding,
    temperature: float,
    generators: list[np.random.Generator],
) -> Decoded:
    """Decode `length` positions after each prompt (B, P), padded left; one source of noise a row.

    At temperature 0 the likeliest token is taken and its log-probability is 0. Log-probabilities are those
    of the distribution that was drawn from, at the temperature.
    """
    plan, mask_id, device = decoding.plan(length), mask_token(model), prompt_ids.device
    rows, low = len(prompt_ids), decoding.selection == "low_confidence"
    shape = (len(plan) if low else 1, length)
    priority = torch.from_numpy(np.stack([g.random(length) for g in generators])).to(device)
    noise = torch.from_numpy(np.stack([g.random(shape) for g in generators])).to(device)
    predict: Any
    if decoding.any_order and decoding.cache:
        predict = CachedPredictor(model, prompt_ids, prompt_mask, mask_id, length)
    else:
        kind = AnyOrderPredictor if decoding.any_order else FullPredictor
        predict = kind(model, prompt_ids, prompt_mask, mask_id)
    ids = torch.full((rows, length), mask_id, device=device)
    step = torch.full_like(ids, -1)
    exact = torch.promote_types(unwrapped(model).dtype, torch.float32)
    logp = torch.zeros(rows, length, dtype=exact, device=device)
    for t, (first, end, count) in enumerate(plan):
        open_ = step[:, first:end] < 0
        at = torch.nonzero(open_)[:, 1].reshape(rows, -1) + first
        if decoding.selection == "random":
            at = at.gather(1, priority.gather(1, at).argsort(1)[:, :count]).sort(1).values
        scores = log_distribution(predict(ids, step, at), temperature or 1.0, mask_id)
        if decoding.selection == "top_probability":
            best = _best(scores.max(-1).values, count)
            at, scores = at.gather(1, best), _rows_at(scores, best)
        tokens = _draw(scores, noise[:, t if low else 0].gather(1, at), temperature)
        found = scores.gather(-1, tokens[..., None])[..., 0]
        if low:
            best = _best(found, count)
            at, tokens, found = (values.gather(1, best) for values in (at, tokens, found))
        ids.scatter_(1, at, tokens)
        step.scatter_(1, at, torch.full_like(at, t))
        if temperature:
            logp.scatter_(1, at, found)
    return Decoded(ids=ids, step=step, logp=logp)


def _best(score: torch.Tensor, count: int) -> torch.Tensor:
    """Columns (B, count) of the highest scores (B, m), in their own order; of equal ones the earlier."""
    order = torch.sort(score, dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(1).values


def _draw(logp: torch.Tensor, noise: torch.Tensor, temperature: float) -> torch.Tensor:
    """Tokens (B, m) by the inverse of the cumulative distribution, from uniform noise (B, m)."""
    if temperature == 0:
        return logp.argmax(-1)
    cumulative = logp.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, noise[..., None] * cumulative[..., -1:], right=True)[..., 0]
    return drawn.clamp(max=logp.shape[-1] - 1)


# --------------------------------------------------------------------------------------------- the engine


class MaskedDiffusionEngine(TransformersEngine):
    """See the module. Samples have all L = max_new_tokens ids in true order and the stream "decode_step".

    What follows the first end token was decoded, too, and belongs to the trajectory, but not to the text:
    there `mask` is 0. Weights are handled as in `TransformersEngine`.
    """

    def __init__(self, model_path: str, **options: Any) -> None:
        self.decoding, rest = read_decoding(options)
        known = ("dtype", "deterministic", "max_batch_sequences", "attn_implementation", "trust_remote_code")
        for name in rest:
            if name not in known:
                names = [*known[2:], *(field.name for field in dataclasses.fields(Decoding))]
                raise UserError(f"unknown setting rollout.options.{name}", allowed=nearest(name, names))
        super().__init__(model_path, **rest)
        check_masked_model(self.model)
        if self.decoding.selection == "low_confidence":
            warnings.warn(LOW_CONFIDENCE, stacklevel=2)

    def _check(self, request: Request) -> None:
        super()._check(request)
        params = request.params
        self.decoding.plan(params.max_new_tokens)
        for name, asked in (
            ("rollout.top_p", params.top_p < 1),
            ("rollout.top_k", params.top_k > 0),
            ("top_logprobs", request.top_logprobs > 0),
            ("capture", bool(request.capture)),
        ):
            if asked:
                raise UserError(
                    f"the masked diffusion engine does not know {name}",
                    fix="leave it at its default, or use another rollout.engine",
                )

    @torch.no_grad()
    def generate(self, requests: list[Request]) -> list[list[Sample]]:
        """See `Engine.generate`. Raises UserError for what this engine cannot do."""
        for request in requests:
            self._check(request)
        answers: list[list[Sample]] = [[] for _ in requests]
        for batch in self._batches(requests):
            for params in {requests[i].params for i in batch}:  # steps and temperature are a batch's
                rows = [(i, j) for i in batch if requests[i].params == params for j in range(requests[i].n)]
                with self._edited(requests[batch[0]].edit):
                    for start in range(0, len(rows), self.max_batch_sequences):
                        self._answer(requests, rows[start : start + self.max_batch_sequences], answers)
        return answers

    def _answer(
        self, requests: list[Request], rows: list[tuple[int, int]], answers: list[list[Sample]]
    ) -> None:
        params = requests[rows[0][0]].params
        longest = max(len(requests[i].prompt_ids) for i, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for at, (i, _) in enumerate(rows):
            prompt = requests[i].prompt_ids
            ids[at, longest - len(prompt) :] = torch.tensor(prompt)
            mask[at, longest - len(prompt) :] = 1
        done = decode(
            self.model,
            ids.to(self.device),
            mask.to(self.device),
            length=params.max_new_tokens,
            decoding=self.decoding,
            temperature=params.temperature,
            generators=[requests[i].generator(j) for i, j in rows],
        )
        ends = torch.tensor(sorted({*self.eos_ids, *params.stop_ids}), device=self.device)
        for at, (i, j) in enumerate(rows):
            answers[i].append(self._made(requests[i], j, done, at, torch.isin(done.ids[at], ends)))

    def _made(self, request: Request, index: int, done: Decoded, at: int, ended: torch.Tensor) -> Sample:
        mask = np.ones(len(ended), np.float32)
        if bool(ended.any()):
            mask[int(ended.long().argmax()) + 1 :] = 0
        return Sample(
            id=sample_id(request, index),
            group=request.group,
            index=index,
            prompt_ids=list(request.prompt_ids),
            completion_ids=done.ids[at].tolist(),
            finish="eos" if bool(ended.any()) else "length",
            logp_rollout=done.logp[at].float().cpu().numpy(),
            version=self.version,
            mask=mask,
            streams={"decode_step": done.step[at].cpu().numpy()},
            meta=dict(request.meta),
        )
