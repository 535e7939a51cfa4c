"""Environments and cost models whose every number can be said in advance."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollouts.collect import GaussianPolicy


class Counter:
    """obs = [episode's start value, steps taken, last action's first entry]; episodes end by a given plan.

    lengths: steps of the first, second, ... episode (then the last one again). An episode whose number is in
    `terminating` ends by termination, the others by the time limit. Reward and cost are 100 and 10000 times
    the episode number plus the step. The start value is drawn from the generator that reset(seed) makes.
    """

    def __init__(self, lengths: tuple[int, ...], terminating: tuple[int, ...] = ()):
        self.lengths, self.terminating = lengths, terminating
        self.seeds: list[int | None] = []
        self.given: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.seeds.append(seed)
        if seed is not None:
            self.rng, self.episode = np.random.default_rng(seed), -1
        self.episode += 1
        self.t, self.start = 0, self.rng.random()
        return self._obs(0.0), {}

    def step(self, action: np.ndarray):
        self.given.append(np.array(action))
        self.t += 1
        end = self.t == self.lengths[min(self.episode, len(self.lengths) - 1)]
        terminated = end and self.episode in self.terminating
        reward, cost = 100.0 * self.episode + self.t, 10_000.0 * self.episode + self.t
        return self._obs(float(action[0])), reward, terminated, end and not terminated, {"cost": cost}

    def _obs(self, last: float) -> np.ndarray:
        return np.array([self.start, self.t, last])


class Tally:
    """A cost model with memory [steps so far, sum of executed actions]; the cost is that sum."""

    def __init__(self) -> None:
        self.gain = np.ones(1, np.float32)

    def init(self, n: int) -> np.ndarray:
        return np.zeros((n, 2), np.float32)

    def step(self, obs: np.ndarray, action: np.ndarray, h: np.ndarray):
        after = h + np.stack([np.ones(len(h)), action.sum(1)], 1).astype(np.float32)
        return after[:, 1] * self.gain, after[:, 0], after

    def augment(self, obs: np.ndarray, h: np.ndarray) -> np.ndarray:
        return np.concatenate([obs, h.astype(np.float32)], -1)


def random_policy(inputs: int, actions: int, obs_dim: int, seed: int = 0, **settings: Any) -> GaussianPolicy:
    """A 2-layer policy of width 5 with drawn weights and the action range [-2, 3] x ..."""
    rng = np.random.default_rng(seed)

    def layer(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        weight = 0.4 * rng.standard_normal((rows, columns), np.float32)
        return weight, 0.1 * rng.standard_normal(rows, np.float32)

    return GaussianPolicy(
        layers=[layer(5, inputs), layer(actions, 5)],
        log_std=np.linspace(-1.0, -0.5, actions).astype(np.float32),
        obs_mean=np.full(obs_dim, 0.5, np.float32),
        obs_std=np.full(obs_dim, 2.0, np.float32),
        action_low=np.full(actions, -2.0, np.float32),
        action_high=np.full(actions, 3.0, np.float32),
        **settings,
    )
