"""The tabular hazard: all trajectories of a two-state chain, cost 1 in state B, safe while count <= k."""

from __future__ import annotations

import itertools

import numpy as np


def trajectories(steps: int) -> np.ndarray:
    """All (2^steps, steps) sequences of A (0) and B (1)."""
    return np.array(list(itertools.product((0, 1), repeat=steps)))


def crossing(path: np.ndarray, budget: int) -> int | None:
    """The step of the (budget + 1)-th visit to B, by counting; None when there is none."""
    visits = 0
    for step, state in enumerate(path):
        visits += int(state)
        if visits == budget + 1 and state:
            return step
    return None


def prefix_labels(path: np.ndarray, budget: int) -> np.ndarray:
    """1 for every prefix [0, end), end = 1 ... steps, that holds at most `budget` visits."""
    return np.array([float(sum(path[:end]) <= budget) for end in range(1, len(path) + 1)], np.float32)
