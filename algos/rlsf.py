"""RLSF: a classifier of single steps, taught the labels of the segments that they lie in.

"Safety through feedback in constrained RL" (Chirra, Varakantham and Paruchuri, NeurIPS 2024; 2406.19626).
The label of every labelled segment (here: prefix) is copied to each of its steps; a classifier learns these
noisy labels; a step that it calls unsafe costs 1, and PPO-Lagrangian holds the mean sum under a **known**
budget. Queries go to the episodes whose steps are new. Everything else is the loop of `algos.traces`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from algos.traces import EstimatorConfig, LabelBatch
from algos.traces_ct import StepModel, TracesCT, TracesCTConfig
from envs.errors import UserError
from rollouts.trajectories import EnvSpec

NOVELTY_STREAM = 8  # first word of the seed of the hash's directions, beside the other streams


class StepClassifier(StepModel):
    """P(unsafe | step) = sigmoid(f). A step costs 1 where it exceeds 1/2."""

    def __init__(self, input_dim: int, config: EstimatorConfig, budget: float):
        super().__init__(input_dim, config)
        self.budget = budget

    def cost(self, f: torch.Tensor) -> torch.Tensor:
        """1 where f > 0."""
        return (f > 0).float()

    @staticmethod
    def numpy_cost(f: np.ndarray) -> np.ndarray:
        return (f > 0).astype(np.float32)

    def loss(self, x: torch.Tensor, batch: LabelBatch, generator: torch.Generator) -> torch.Tensor:
        """Cross-entropy over all pairs of a prefix and a step in it; x (T, B, S + A).

        A step lies in every prefix that ends after it, so the pairs of one step are counted, not copied.
        """
        f = self(x)
        unsafe, safe = torch.zeros_like(f), torch.zeros_like(f)
        safe.index_put_(batch.index, batch.labels, accumulate=True)
        unsafe.index_put_(batch.index, 1.0 - batch.labels, accumulate=True)
        unsafe, safe = (labels.flip(0).cumsum(0).flip(0) for labels in (unsafe, safe))
        unsafe = unsafe * self.config.class_weight
        softplus = nn.functional.softplus
        return (unsafe * softplus(-f) + safe * softplus(f)).sum() / (unsafe + safe).sum()

    def episode_p_safe(self, total_cost: np.ndarray | float) -> np.ndarray:
        """1 for episodes whose unsafe steps fit into the budget, else 0."""
        return (np.asarray(total_cost, np.float64) <= self.budget).astype(np.float64)


@dataclass(kw_only=True)
class RLSFConfig(TracesCTConfig):
    """`budget` is known to the learner here, as in the paper; novelty is by sign hashes of `novelty_bits`."""

    name: str = "rlsf"
    query_uncertain_share: float = 1.0
    novelty_bits: int = 12
    estimator: EstimatorConfig = field(
        default_factory=lambda: EstimatorConfig(decoder_width=64, class_weight=1.0)
    )


class RLSF(TracesCT):
    """The loop of `algos.traces` around a per-step classifier, a known budget and novelty."""

    Config = RLSFConfig

    @classmethod
    def check(cls, cfg: Any) -> None:
        super().check(cfg)
        if not 1 <= cfg.algo.novelty_bits <= 20:
            raise UserError(
                "algo.novelty_bits is out of range", given=cfg.algo.novelty_bits, allowed="1 to 20"
            )

    @classmethod
    def describe(cls, cfg: Any) -> list[str]:
        return [
            f"known limit: on average at most {cfg.algo.budget:g} steps an episode that the classifier calls "
            "unsafe; this algorithm is told the annotator's budget",
            super().describe(cfg)[1],
        ]

    def make_estimator(self, spec: EnvSpec) -> Any:
        size = spec.obs_dim + spec.action_dim
        rng = np.random.default_rng((NOVELTY_STREAM, self.seed))
        self._directions = rng.standard_normal((size, self.config.novelty_bits))
        return StepClassifier(size, self.config.estimator, self.config.budget)

    def budget_of_sums(self) -> float:
        return self.config.budget

    def codes(self, inputs: np.ndarray) -> np.ndarray:
        """Which side of each random direction a step's scaled input (n, S + A) lies on, as numbers (n,)."""
        e = self.estimator
        sides = ((inputs - e.input_mean.numpy()) / e.input_std.numpy()) @ self._directions > 0
        return sides @ (1 << np.arange(self.config.novelty_bits))

    def _doubt(self, inputs: np.ndarray, mean: np.ndarray, var: np.ndarray, score: float) -> float:
        """Novelty: the share of steps whose code no labelled trajectory holds."""
        return float(np.mean(~self._known[self.codes(inputs)]))

    def _refresh(self) -> None:
        super()._refresh()
        self._known = np.zeros(1 << self.config.novelty_bits, bool)
        for x in self.labeled:
            self._known[self.codes(x.inputs)] = True
