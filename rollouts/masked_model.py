"""How a masked language model is asked for its distributions: who sees whom, positions, probabilities.

Two ways. *Full*: every token of prompt and completion sees every other; what is not decoded yet is the mask
token. *Any order* (arXiv 2509.21474, section on any-order decoding; Eso-LM): each completion token is
there twice, clean and as a mask twin of the same position; clean tokens see the prompt and what was decoded
before them, a twin sees the prompt, what was decoded in earlier steps, and itself. Then one pass over
P + 2L tokens scores a whole decoding, and keys and values of clean tokens can be cached.

Pure functions on tensors; trains nothing. B rows, P prompt tokens (padded left), L completion tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from envs.errors import UserError


def unwrapped(model: Any) -> Any:
    """The model inside wrappers for several processes and for adapters."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def mask_token(model: Any) -> int:
    """The id that stands for "not decoded yet", `mask_token_id` of the model's config. Raises UserError."""
    found = getattr(unwrapped(model).config, "mask_token_id", None)
    if found is None:
        raise UserError(
            "this model has no mask token: it is not a masked language model",
            given=f"{type(unwrapped(model)).__name__}, mask_token_id=None in its config",
            fix="choose a masked diffusion model, model.name=tiny model.tiny_objective=masked, or put "
            "mask_token_id into the config.json of a masked model that lacks it",
        )
    return int(found)


def check_masked_model(model: Any) -> None:
    """Raise UserError for a model that cannot be asked with a mask of its own over attention."""
    mask_token(model)
    attention = getattr(unwrapped(model).config, "_attn_implementation", None)
    if attention == "flash_attention_2":
        raise UserError(
            "this attention kernel takes no mask of who sees whom",
            given="model.attn_implementation=flash_attention_2",
            allowed=("sdpa", "eager"),
        )


# ------------------------------------------------------------------------------------------ who sees whom


def true_positions(prompt_mask: torch.Tensor, length: int) -> torch.Tensor:
    """0-based positions (B, P + L), padding not counted."""
    real = torch.cat([prompt_mask.long(), prompt_mask.new_ones(len(prompt_mask), length).long()], 1)
    return (real.cumsum(1) - 1).clamp(min=0)


def full_visibility(prompt_mask: torch.Tensor, length: int) -> torch.Tensor:
    """(B, P + L, P + L) bool, rows see columns: everything but padding."""
    real = torch.cat([prompt_mask.bool(), prompt_mask.new_ones(len(prompt_mask), length).bool()], 1)
    return real[:, None, :].expand(-1, real.shape[1], -1)


def any_order_visibility(prompt_mask: torch.Tensor, decode_step: torch.Tensor) -> torch.Tensor:
    """(B, P + 2L, P + 2L) bool over prompt, clean tokens and mask twins, both in true order.

    `decode_step` (B, L) int. Prompt: the whole prompt. Clean l: prompt, itself and clean j before it in
    (step, position). Twin l: prompt, itself and clean j of earlier steps; a peer of its own step is hidden.
    """
    (rows, before), length = prompt_mask.shape, decode_step.shape[1]
    clean, twin = slice(before, before + length), slice(before + length, None)
    size = before + 2 * length
    place = torch.arange(length, device=decode_step.device)
    order = decode_step * length + place
    visible = torch.zeros(rows, size, size, dtype=torch.bool, device=decode_step.device)
    visible[:, :, :before] = prompt_mask.bool()[:, None, :]
    visible[:, clean, clean] = order[:, None, :] <= order[:, :, None]
    visible[:, twin, clean] = decode_step[:, None, :] < decode_step[:, :, None]
    # Nobody is without a key: softmax over nothing is not a number.
    return visible | torch.eye(size, dtype=torch.bool, device=decode_step.device)


# ---------------------------------------------------------------------------------------------- the model


def ask(
    model: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
    keep: int,
    cache: Any = None,
) -> torch.Tensor:
    """Logits (B, keep, V) at the last `keep` of the Q tokens `ids` (B, Q) at `positions` (B, Q).

    visible: (B, Q, K) bool, K = Q plus what `cache` holds. Raises UserError for a model whose code takes no
    positions or masks when those matter.
    """
    inside = unwrapped(model)
    takes = inspect.signature(inside.forward).parameters
    if "position_ids" not in takes:
        return _ask_plain(model, inside, ids, positions, visible, keep, cache)
    blocked = torch.finfo(inside.dtype).min
    bias = torch.zeros(visible.shape, dtype=inside.dtype, device=ids.device).masked_fill(~visible, blocked)
    more: dict[str, Any] = {"logits_to_keep": keep} if "logits_to_keep" in takes else {}
    if cache is not None:
        more["past_key_values"] = cache
    out = model(
        input_ids=ids,
        attention_mask=bias[:, None],
        position_ids=positions,
        use_cache=cache is not None,
        **more,
    )
    return out.logits[:, -keep:]


def _ask_plain(
    model: Any,
    inside: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
    keep: int,
    cache: Any,
) -> torch.Tensor:
    """A model whose code always shows every token to every other, at positions 0, 1, 2, ... (LLaDA's)."""
    plain = torch.arange(ids.shape[1], device=ids.device).expand_as(positions)
    if cache is not None or not bool(visible.all()) or not torch.equal(positions, plain):
        raise UserError(
            "this model's code takes no position ids and ignores attention masks",
            given=f"{type(inside).__name__}, asked for padded prompts or for a decoding order",
            allowed="prompts of one length in a batch, full visibility (no any-order likelihood or sampler)",
            fix="set learner.samples_per_device_batch=1 rollout.prompts_per_step=1, or choose another model",
        )
    return model(input_ids=ids).logits[:, -keep:]


def full_logits(
    model: Any, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Logits (B, L, V) at every position of the completion's `state` (B, L), masks where not decoded."""
    length = state.shape[1]
    return ask(
        model,
        torch.cat([prompt_ids, state], 1),
        true_positions(prompt_mask, length),
        full_visibility(prompt_mask, length),
        length,
    )


def any_order_logits(
    model: Any,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    decode_step: torch.Tensor,
    mask_id: int,
) -> torch.Tensor:
    """Logits (B, L, V) of each position as it was when its step came, all in one pass over P + 2L tokens."""
    before, length = prompt_ids.shape[1], completion_ids.shape[1]
    positions = true_positions(prompt_mask, length)
    return ask(
        model,
        torch.cat([prompt_ids, completion_ids, torch.full_like(completion_ids, mask_id)], 1),
        torch.cat([positions, positions[:, before:]], 1),
        any_order_visibility(prompt_mask, decode_step),
        length,
    )


# ------------------------------------------------------------------------------------------ probabilities


def log_distribution(logits: torch.Tensor, temperature: float, mask_id: int) -> torch.Tensor:
    """log softmax(logits / temperature) (..., V), the mask token's probability 0; at least float32."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    banned = torch.tensor([mask_id], device=logits.device)
    return torch.log_softmax(exact.index_fill(-1, banned, -torch.inf) / temperature, -1)


def chosen_log_probs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, mask_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities of `ids`, entropies in nats without gradient), both (B, L)."""
    logp = log_distribution(logits, temperature, mask_id)
    entropy = torch.special.entr(logp.detach().exp()).sum(-1)
    return logp.gather(-1, ids[..., None])[..., 0], entropy
