"""Losses of masked language models on prompts and completions of fixed length. Knows tensors, no algorithm.

`masked_loss` trains a model that sees everything, `any_order_loss` one that obeys the any-order rules of
`rollouts.masked_model`. Noise comes from torch's generator of this process, which checkpoints keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from envs.errors import UserError
from rollouts.masked_model import any_order_logits, full_logits


@dataclass(kw_only=True)
class MaskedRows:
    """prompt_ids, prompt_mask (B, P), padded left; completion_ids (B, L), filled up with end tokens."""

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor


def fixed_rows(
    prompts: list[list[int]], answers: list[list[int]], length: int, *, pad: int, end: int
) -> MaskedRows:
    """Rows whose completions are `answers` filled up with `end` to `length`, which may leave none.

    Raises UserError for an answer that is longer, its end token not counted.
    """
    before = max(map(len, prompts))
    ids = torch.full((len(prompts), before), pad)
    mask = torch.zeros_like(ids)
    completion = torch.full((len(prompts), length), end)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        words = answer[:-1] if answer and answer[-1] == end else answer
        if len(words) > length:
            raise UserError(
                "an answer is longer than the completions of a masked model, whose length is fixed",
                given=f"{len(words)} tokens, rollout.max_new_tokens={length}",
                fix=f"rollout.max_new_tokens={len(words)} or more",
            )
        ids[i, before - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[i, before - len(prompt) :] = 1
        completion[i, : len(words)] = torch.tensor(words, dtype=torch.long)
    return MaskedRows(prompt_ids=ids, prompt_mask=mask, completion_ids=completion)


def rows_of_labels(ids: torch.Tensor, labels: torch.Tensor, length: int, *, pad: int, end: int) -> MaskedRows:
    """Rows of a next-token batch (B, T): what has a label (not -100) is the completion, before it the prompt.

    Raises UserError as `fixed_rows` does.
    """
    prompts, answers = [], []
    for row, label in zip(ids.tolist(), labels.tolist()):
        chosen = [i for i, value in enumerate(label) if value != -100]
        first = chosen[0] if chosen else len(row)
        prompts.append(row[:first])
        answers.append([row[i] for i in chosen])
    rows = fixed_rows(prompts, answers, length, pad=pad, end=end)
    for name in ("prompt_ids", "prompt_mask", "completion_ids"):
        setattr(rows, name, getattr(rows, name).to(ids.device))
    return rows


def masked_loss(model: Any, rows: MaskedRows, mask_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, accuracy): mean over rows of the mean cross-entropy at k masked positions, k uniform in 1..L.

    L times its expectation is the bound -E log p of decoding in random order, one token a step (MDLM, LLaDA:
    the weight 1/t; Hoogeboom et al. 2021).
    """
    ids = rows.completion_ids
    count = torch.randint(1, ids.shape[1] + 1, (len(ids), 1)).to(ids.device)
    rank = torch.rand(ids.shape).argsort(1).argsort(1).to(ids.device)
    masked = rank < count
    state = ids.masked_fill(masked, mask_id)
    logits = full_logits(model, rows.prompt_ids, rows.prompt_mask, state)
    return _mean_over(logits, ids, masked, mask_id)


def any_order_loss(
    model: Any, rows: MaskedRows, mask_id: int, block_length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, accuracy): mean over rows of the mean cross-entropy of all L mask twins, in one random order.

    The order is uniform within blocks of `block_length` positions (None: within all), blocks left to right
    (arXiv 2509.21474, any-order fine-tuning in the authors' code).
    """
    ids = rows.completion_ids
    place = torch.arange(ids.shape[1])
    block = place // (block_length or ids.shape[1])
    order = (block + torch.rand(ids.shape)).argsort(1)
    step = torch.empty_like(order).scatter_(1, order, place.expand_as(order)).to(ids.device)
    logits = any_order_logits(model, rows.prompt_ids, rows.prompt_mask, ids, step, mask_id)
    return _mean_over(logits, ids, torch.ones_like(ids, dtype=torch.bool), mask_id)


def _mean_over(
    logits: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor, mask_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    banned = torch.tensor([mask_id], device=logits.device)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).index_fill(-1, banned, -torch.inf)
    loss = cross_entropy(exact.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    weight = chosen / chosen.sum(1, keepdim=True)
    right = (exact.detach().argmax(-1) == ids) * weight
    return (loss * weight).sum(1).mean(), right.sum(1).mean()
