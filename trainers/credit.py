"""Credit of policy gradients: advantages within groups, off-policy weights. Pure functions on arrays."""

from __future__ import annotations

import numpy as np

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
    r = np.where(valid, rewards, 0.0).astype(np.float32)
    count = valid.sum(1, keepdims=True)
    mean = r.sum(1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, r - mean, 0.0).astype(np.float32)
    if scale == "group":
        std = np.sqrt((centred**2).sum(1, keepdims=True) / np.maximum(count - 1, 1))
    elif scale == "batch":
        every = r[valid]
        std = np.float32(every.std(ddof=1) if len(every) > 1 else 0.0)
    else:
        std = None
    advantages = centred if std is None else centred / (std + np.float32(epsilon))
    return np.where(count >= 2, advantages, 0.0).astype(np.float32)


def off_policy_weight(logp_learner: np.ndarray, logp_rollout: np.ndarray, cap: float) -> np.ndarray:
    """min(pi_learner / pi_rollout, cap) per token, from log-probabilities of any one shape.

    The truncated importance weight (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"): non-negative, so multiplied into an advantage it commutes with PPO's clipping.
    """
    return np.exp(np.minimum(logp_learner - logp_rollout, np.log(cap)))
