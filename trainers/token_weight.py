"""Weights on the tokens of a cross-entropy: sum_i w_i l_i / N, with w from the logits and without gradient.

Wraps the forward pass that TRL's SFT trainer calls, which never builds the logits of a whole batch; neither
does this. N stays the number of target tokens: weights shift attention between tokens, not the denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from envs.errors import UserError

CHUNK = 1024  # tokens whose logits exist at a time
TokenWeight = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits (N, V), labels (N)) -> (N)


def weigh_tokens(model: Any, token_weight: TokenWeight) -> None:
    """Multiply the log-probabilities that `model(..., fused_lm_head=True)` returns by their tokens' weights.

    Raises UserError for a model whose logits are more than its last hidden states through its head.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            raise UserError(
                f"token weights are not available for models with {name}", given=type(base).__name__
            )
    inner, seen = base.forward, []
    base.base_model.register_forward_hook(
        lambda module, args, output: seen.append(output.last_hidden_state.detach())
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.clear()
        output = inner(*args, **kwargs)
        if kwargs.get("fused_lm_head") and torch.is_grad_enabled():
            weights = _weights(base, seen[-1][:, :-1], kwargs["labels"][:, 1:], token_weight)
            output.log_probs = output.log_probs * weights
        seen.clear()
        return output

    base.forward = forward


@torch.no_grad()
def _weights(
    base: Any, hidden: torch.Tensor, labels: torch.Tensor, token_weight: TokenWeight
) -> torch.Tensor:
    mask = labels != -100
    states, targets, found = hidden[mask], labels[mask], []
    head = base.get_output_embeddings()
    for rows, wanted in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
        weights = token_weight(head(rows), wanted)
        if weights.shape != wanted.shape:
            raise ValueError(f"token_weight returned {tuple(weights.shape)} for {len(wanted)} tokens")
        found.append(weights)
    out = torch.zeros(labels.shape, dtype=hidden.dtype, device=hidden.device)
    out[mask] = torch.cat(found).to(out.dtype)
    return out
