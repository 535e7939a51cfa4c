"""Safe/unsafe labels for whole trajectories and their prefixes, and what they cost to get.

An annotator is the seam: whatever judges episodes may stand here (a person: rewards.human). The oracle in
this file simulates one who sees the true cost against a limit that nobody else is told. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from envs.errors import UserError

Judgement = tuple[np.ndarray, np.ndarray]  # prefix ends (K,) in steps, the last one L; labels (K,), 1 safe


class Annotator(Protocol):
    """Judges episodes; each has `inputs` (L, S + A), `costs` (L,), `terminated` and perhaps a `replay`."""

    def label(self, episodes: Sequence[Any], rng: np.random.Generator) -> list[Judgement | None]:
        """A judgement an episode, in their order; None for one that the annotator does not judge."""
        ...


class LabelOracle(Protocol):
    """Answers whether each prefix [0, end) of a trajectory stayed inside the limit."""

    def label(self, costs: np.ndarray, ends: np.ndarray, terminated: bool, rng) -> np.ndarray:
        """True per-step costs (L,), prefix ends (K,) in steps, the last one L -> labels (K,), 1 safe."""
        ...


def whole_is_safe(costs: np.ndarray, terminated: bool, budget: float) -> bool:
    """Whether a trajectory of per-step costs (L,) kept the budget and reached the time limit."""
    return not terminated and bool(costs.sum(dtype=np.float64) <= budget)


class ThresholdOracle:
    """A prefix is safe when its summed cost is at most `budget`; the whole also has to reach the time limit.

    noise: probability that a label, whole or prefix, is flipped, independently. Raises UserError when it
    lies outside [0, 0.5) (at 0.5 labels say nothing) or when the budget is negative.
    """

    def __init__(self, budget: float, noise: float = 0.0):
        if not 0 <= noise < 0.5:
            raise UserError(
                "label noise is the probability of a flipped label",
                given=noise,
                allowed="[0, 0.5)",
                fix="set algo.noise to 0, or to less than 0.5",
            )
        if not budget >= 0:  # NaN too
            raise UserError("a cost budget is a number, at least 0", given=budget, allowed="[0, inf)")
        self.budget, self.noise = budget, noise

    def label(
        self, costs: np.ndarray, ends: np.ndarray, terminated: bool, rng: np.random.Generator
    ) -> np.ndarray:
        """See `LabelOracle.label`. Float32 0 or 1."""
        safe = np.cumsum(costs, dtype=np.float64)[ends - 1] <= self.budget
        safe[-1] &= not terminated
        return (safe ^ (rng.random(len(safe)) < self.noise)).astype(np.float32)


def prefix_ends(length: int, slice_steps: int) -> np.ndarray:
    """Ends of the prefixes that are labelled: every `slice_steps` steps, and the whole trajectory.

    Raises UserError when the trajectory is empty.
    """
    if length < 1:
        raise UserError("an empty trajectory cannot be labelled", given=f"length {length}", allowed=">= 1")
    ends = np.arange(slice_steps, length + 1, slice_steps)
    return ends if len(ends) and ends[-1] == length else np.append(ends, length)


class OracleAnnotator:
    """An oracle's labels of every `slice_steps`-th prefix and the whole."""

    def __init__(self, oracle: LabelOracle, slice_steps: int):
        self.oracle, self.slice_steps = oracle, slice_steps

    def label(self, episodes: Sequence[Any], rng: np.random.Generator) -> list[Judgement | None]:
        """See `Annotator.label`; every episode is judged."""
        found: list[Judgement | None] = []
        for e in episodes:
            ends = prefix_ends(len(e.costs), self.slice_steps)
            found.append((ends, self.oracle.label(e.costs, ends, e.terminated, rng)))
        return found


@dataclass
class QueryCounter:
    """Three ways to count what labels cost.

    trajectories: labelled ones. code: 1 for the whole plus 1 per prefix that ends up safe, as published
    code counts. minimal: 1 for a safe trajectory (its prefixes follow), else 1 plus its safe prefixes.
    """

    trajectories: int = 0
    code: int = 0
    minimal: int = 0

    def add(self, labels: np.ndarray) -> None:
        """Count one trajectory by its labels (K,), the last one for the whole."""
        safe_prefixes = int(labels[:-1].sum())
        self.trajectories += 1
        self.code += 1 + safe_prefixes
        self.minimal += 1 if labels[-1] else 1 + safe_prefixes
