"""Running mean and standard deviation of a stream of batches (NumPy, float64)."""

from __future__ import annotations

from typing import Any

import numpy as np


class RunningMeanStd:
    """Exact mean and population variance of all rows seen, per column, by Chan's parallel update.

    Before the first batch the mean is 0 and the standard deviation 1.
    """

    def __init__(self, dim: int):
        self.mean, self.var, self.count = np.zeros(dim), np.ones(dim), 0.0

    def update(self, rows: np.ndarray) -> None:
        """Take in rows (..., dim)."""
        rows = np.asarray(rows, np.float64).reshape(-1, len(self.mean))
        if not len(rows):
            return
        n, mean, var = float(len(rows)), rows.mean(0), rows.var(0)
        if self.count == 0.0:
            self.mean, self.var, self.count = mean, var, n
            return
        total, delta = self.count + n, mean - self.mean
        self.var = (self.var * self.count + var * n + delta**2 * self.count * n / total) / total
        self.mean = self.mean + delta * n / total
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """Standard deviation (dim,), never 0."""
        return np.sqrt(self.var + 1e-8)

    def state_dict(self) -> dict[str, Any]:
        """Mean, variance and count."""
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of `state_dict`."""
        self.mean, self.var, self.count = np.array(state["mean"]), np.array(state["var"]), state["count"]
