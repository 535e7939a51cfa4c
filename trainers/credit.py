"""Credit of policy gradients: advantages within groups, off-policy weights. Pure functions on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

SCALES = ("group", "batch", "none")


def group_advantages(
    rewards: np.ndarray, valid: np.ndarray, scale: str = "group", epsilon: float = 1e-4
) -> np.ndarray:
    """A = (r - mean of the group) / (std + epsilon), float32 (P, G), from the valid samples alone.

    `rewards` and `valid` (bool) are (P, G): P prompts, G samples each. `scale` says whose standard deviation
    (unbiased) divides: that of the group, of the whole batch, or none. Samples that are not valid, and
    groups with fewer than two valid ones, get 0. GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1);
    "none" is Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).
    """
    import torch  # its float32 arithmetic, so that TRL's own trainer gives the same bits

    r = torch.from_numpy(np.where(valid, rewards, np.nan).astype(np.float32))
    centred = r - torch.nanmean(r, dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (_nanstd(r, 1) + epsilon)
    elif scale == "batch":
        centred = centred / (_nanstd(r.reshape(1, -1), 1) + epsilon)
    alone = valid.sum(1, keepdims=True) < 2
    return np.where(alone, 0.0, torch.nan_to_num(centred, nan=0.0).numpy()).astype(np.float32)


def _nanstd(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Unbiased standard deviation along `dim`, which stays, of the entries that are not NaN."""
    variance = ((x - x.nanmean(dim, keepdim=True)) ** 2).nanmean(dim, keepdim=True)
    count = (~x.isnan()).sum(dim, keepdim=True)
    return (variance * (count / (count - 1))).sqrt()


def off_policy_weight(logp_learner: np.ndarray, logp_rollout: np.ndarray, cap: float) -> np.ndarray:
    """min(pi_learner / pi_rollout, cap) per token, from log-probabilities of any one shape.

    The truncated importance weight (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"): non-negative, so multiplied into an advantage it commutes with PPO's clipping.
    """
    return np.exp(np.minimum(logp_learner - logp_rollout, np.log(cap)))
