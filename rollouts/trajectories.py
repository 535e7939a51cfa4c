"""Control experience as plain arrays, time first. No learning code, no Ray.

A `Rollout` is what T steps of N environments gave; an `Episode` is a window into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Sizes and limits an algorithm may know of an environment. `horizon` counts env steps."""

    obs_dim: int
    action_low: np.ndarray  # (A,), env units
    action_high: np.ndarray  # (A,)
    horizon: int

    @property
    def action_dim(self) -> int:
        return len(self.action_low)


@dataclass(frozen=True)
class Episode:
    """One episode inside a rollout: environment `env`, steps [start, end)."""

    env: int
    start: int
    end: int
    terminated: bool  # the environment ended it; False: the time limit did

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(kw_only=True)
class Rollout:
    """T steps of N environments under one numbered policy.

    obs (T+1, N, D) and memory (T+1, N, M) are the states *before* each step; after an episode's last step
    they hold the next episode's first state, and the episode's own last state is in `final_obs`.
    `actions` are the policy's samples in units where [-1, 1] is the action range, not yet clipped;
    `executed` is what the environment was given. `costs` are the environment's true costs: only an
    algorithm that declares `uses_true_cost` may see them.
    """

    obs: np.ndarray
    memory: np.ndarray
    actions: np.ndarray  # (T, N, A)
    means: np.ndarray  # (T, N, A): the policy's mean actions, to compare with the learner's own
    executed: np.ndarray  # (T, N, A), env units
    rewards: np.ndarray  # (T, N)
    costs: np.ndarray | None  # (T, N)
    terminated: np.ndarray  # (T, N) bool
    truncated: np.ndarray  # (T, N) bool: by the time limit
    model_cost: np.ndarray  # (T, N): mean of the learned cost, zeros without a cost model
    model_cost_var: np.ndarray  # (T, N)
    final_index: np.ndarray  # (K, 2): step and environment of every episode end
    final_obs: np.ndarray  # (K, D)
    final_memory: np.ndarray  # (K, M)
    version: tuple[int, int]  # (attempt, step) of the weights that acted

    @property
    def shape(self) -> tuple[int, int]:
        """(T, N)."""
        return self.rewards.shape

    @property
    def done(self) -> np.ndarray:
        """(T, N) bool: the step that ended an episode, either way."""
        return self.terminated | self.truncated

    def episodes(self) -> list[Episode]:
        """Whole episodes, by environment, then by time. A window cut by the rollout's end is none."""
        found, done = [], self.done
        for env in range(self.shape[1]):
            start = 0
            for end in np.flatnonzero(done[:, env]) + 1:
                found.append(Episode(env, start, int(end), bool(self.terminated[end - 1, env])))
                start = int(end)
        return found

    def episode_sums(self, values: np.ndarray | None, episodes: Sequence[Episode]) -> np.ndarray:
        """Sum of `values` (T, N) over each episode, float64 (number of episodes,). None: may not be seen."""
        if values is None:
            raise ValueError("these values are hidden from who asks for their sums")
        return np.array([values[e.start : e.end, e.env].sum(dtype=np.float64) for e in episodes])


def concatenate(shards: Sequence[Rollout]) -> Rollout:
    """Join rollouts of the same length and version side by side, in the order given.

    Raises ValueError when the shards come from different weights: they would be mixed silently.
    """
    versions = {shard.version for shard in shards}
    if len(versions) != 1:
        raise ValueError(f"rollouts of different weight versions cannot be joined: {sorted(versions)}")
    joined: dict[str, Any] = {"version": shards[0].version}
    for f in fields(Rollout):
        parts = [getattr(shard, f.name) for shard in shards]
        if f.name in ("final_obs", "final_memory"):
            joined[f.name] = np.concatenate(parts, axis=0)
        elif f.name == "final_index":
            offsets = np.cumsum([0] + [shard.shape[1] for shard in shards[:-1]])
            joined[f.name] = np.concatenate(
                [p + np.array([0, o]) for p, o in zip(parts, offsets, strict=True)], axis=0
            )
        elif f.name != "version":
            joined[f.name] = np.concatenate(parts, axis=1)
    return Rollout(**joined)
