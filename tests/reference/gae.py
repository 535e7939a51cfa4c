"""Generalised advantages by the definition: one sum per step, nothing carried from step to step."""

from __future__ import annotations

from collections.abc import Sequence


def gae_of_episode(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> list[float]:
    """A_t = sum_{k >= t} (gamma lam)^(k - t) (r_k + gamma V_{k+1} - V_k) for one stretch of steps.

    `values` has one entry more than `rewards`: the last is what the state after the last step is worth, 0 if
    the episode terminated there.
    """
    steps = len(rewards)
    assert len(values) == steps + 1
    advantages = []
    for t in range(steps):
        total = 0.0
        for k in range(t, steps):
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * values[k + 1] - values[k])
        advantages.append(total)
    return advantages
