"""Synthetic episodes whose hidden limit depends on the step alone, or on what happened before it.

Four observed numbers and one action, each an autoregression of unit variance over 60 steps; nothing in them
says what costs. Both tasks are labelled by counting, step by step.
"""

from __future__ import annotations

import numpy as np

STEPS, SLICE = 60, 5
TASKS = {"markov": 5, "latch": 8}  # name -> budget


def episode(rng: np.random.Generator) -> np.ndarray:
    """(60, 5): x_{t+1} = 0.9 x_t + sqrt(1 - 0.81) e, from the stationary start."""
    x = np.empty((STEPS, 5), np.float32)
    x[0] = rng.standard_normal(5)
    for t in range(1, STEPS):
        x[t] = 0.9 * x[t - 1] + np.sqrt(0.19) * rng.standard_normal(5)
    return x


def costs(task: str, x: np.ndarray) -> list[float]:
    """markov: 1 while x_0 > 1. latch: once x_1 > 1.2 was seen, 1 while x_0 > 0.2 on later steps."""
    out, latched = [], False
    for row in x:
        if task == "markov":
            out.append(float(row[0] > 1.0))
        else:
            out.append(float(latched and row[0] > 0.2))
            latched = latched or row[1] > 1.2
    return out


def crossing(task: str, x: np.ndarray) -> int | None:
    """The step on which the sum of costs first exceeds the budget; None when it never does."""
    total = 0.0
    for t, cost in enumerate(costs(task, x)):
        total += cost
        if total > TASKS[task]:
            return t
    return None
