"""CT, the memoryless baseline of the TraCeS paper: a learned cost of each step against a learned budget.

c(x) = exp(f(x)) for the step x = [observation; executed action], B = exp(b), and P(safe) of a prefix is
sigmoid(B - sum c). Labels, queries, schedule and update are those of `algos.traces`; what differs is what is
fitted to the labels and what the multiplier follows: the mean learned sum against the learned budget.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from algos.traces import (
    INPUT_CLIP,
    EstimatorConfig,
    LabelBatch,
    ScaledInput,
    Traces,
    TracesConfig,
    weighted_mean,
)
from rollouts.trajectories import EnvSpec, Rollout
from trainers.control import Constraint
from trainers.normalize import RunningMeanStd

LOG_COST = (-12.0, 4.0)  # limits of f(x)


class StepModel(ScaledInput):
    """A network f without memory over [raw observation; executed action]: two ReLU layers of one width."""

    summary_size = 0  # columns of memory that the policy may see

    def __init__(self, input_dim: int, config: EstimatorConfig):
        super().__init__(input_dim)
        self.config = config
        width = config.decoder_width
        self.net = nn.Sequential(nn.Linear(input_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """f of raw inputs (..., S + A), (...,)."""
        return self.head(self.net(self.scaled(x)))[..., 0]

    def cost(self, f: torch.Tensor) -> torch.Tensor:
        """A step's cost from f."""
        raise NotImplementedError

    @staticmethod
    def numpy_cost(f: np.ndarray) -> np.ndarray:
        """`cost` on the runners."""
        raise NotImplementedError

    def credit(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Costs of steps (T, B, S + A) and their variance, which is 0; each (T, B)."""
        cost = self.cost(self(x))
        return cost, torch.zeros_like(cost)

    def runner(self, memory_norm: RunningMeanStd, version: int, active: bool, visible: bool) -> StepCostModel:
        """The cost model that travels to the runners."""
        return StepCostModel(self, version, active)


class StepCostModel:
    """A `StepModel` as the runners carry it: no memory, and no cost while inactive."""

    def __init__(self, model: StepModel, version: int, active: bool):
        self.arrays = {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}
        self.version, self.active, self.cost_of = version, active, type(model).numpy_cost

    def init(self, n: int) -> np.ndarray:
        """No memory: (n, 0)."""
        return np.zeros((n, 0), np.float32)

    def step(self, obs: np.ndarray, action: np.ndarray, h: np.ndarray):
        """Raw observation (n, S), executed action (n, A) -> cost (n,), zeros (n,), and h as it was."""
        zero = np.zeros(len(obs), np.float32)
        if not self.active:
            return zero, zero, h
        a = self.arrays
        x = (np.concatenate([obs, action], 1) - a["input_mean"]) / a["input_std"]
        x = np.clip(x, -INPUT_CLIP, INPUT_CLIP)
        for i in (0, 2):
            x = np.maximum(x @ a[f"net.{i}.weight"].T + a[f"net.{i}.bias"], 0.0)
        return self.cost_of(x @ a["head.weight"][0] + a["head.bias"][0]), zero, h

    def augment(self, obs: np.ndarray, h: np.ndarray) -> np.ndarray:
        """The policy sees plain observations."""
        return obs


class LearnedBudget(StepModel):
    """CT's estimator. f starts so that an episode of average steps costs about the first budget (ours)."""

    def __init__(self, input_dim: int, config: EstimatorConfig, horizon: int):
        super().__init__(input_dim, config)
        self.log_budget = nn.Parameter(torch.tensor(1.0))
        with torch.no_grad():
            self.head.bias.fill_(1.0 - math.log(horizon))

    @property
    def budget(self) -> float:
        """B = exp(b)."""
        return math.exp(self.log_budget.item())

    def cost(self, f: torch.Tensor) -> torch.Tensor:
        """exp(f), f cut to LOG_COST."""
        return f.clamp(*LOG_COST).exp()

    @staticmethod
    def numpy_cost(f: np.ndarray) -> np.ndarray:
        return np.exp(np.clip(f, *LOG_COST))

    def loss(self, x: torch.Tensor, batch: LabelBatch, generator: torch.Generator) -> torch.Tensor:
        """Weighted cross-entropy of sigmoid(B - sum c) over all prefixes of trajectories (T, B, S + A)."""
        margin = self.log_budget.exp() - torch.cumsum(self.cost(self(x)), 0)[batch.index]
        losses = nn.functional.binary_cross_entropy_with_logits(margin, batch.labels, reduction="none")
        return weighted_mean(losses, batch.labels, self.config.class_weight)

    def episode_p_safe(self, total_cost: np.ndarray | float) -> np.ndarray:
        """sigmoid(B - sum c) of whole episodes."""
        return 0.5 * (1.0 + np.tanh(0.5 * (self.budget - np.asarray(total_cost, np.float64))))


@dataclass(kw_only=True)
class TracesCTConfig(TracesConfig):
    """As TraCeS's; no correction of P_safe, because the multiplier does not follow P_safe."""

    name: str = "traces_ct"
    bias_labels: int = 0
    memory_in_policy: bool = False  # there is none
    estimator: EstimatorConfig = field(
        default_factory=lambda: EstimatorConfig(decoder_width=64, class_weight=1.0)
    )


class TracesCT(Traces):
    """TraCeS's loop around a memoryless cost: lambda follows (mean learned sum - budget) / budget."""

    Config = TracesCTConfig

    def __init__(self, config: TracesCTConfig, spec: EnvSpec, seed: int):
        super().__init__(config, spec, seed)
        self._sums: deque[float] = deque(maxlen=config.window_episodes)

    @classmethod
    def describe(cls, cfg: Any) -> list[str]:
        hidden, labels = super().describe(cfg)
        return [f"{hidden.split(';')[0]}; constraint: mean learned cost <= learned budget", labels]

    def make_estimator(self, spec: EnvSpec) -> Any:
        return LearnedBudget(spec.obs_dim + spec.action_dim, self.config.estimator, spec.horizon)

    def budget_of_sums(self) -> float:
        """What the mean learned sum is held under."""
        return self.estimator.budget

    def constrain(self, rollout: Rollout) -> Constraint:
        """As TraCeS's, with the sums of the learned cost beside P_safe."""
        if self.active:
            self._sums.extend(rollout.episode_sums(rollout.model_cost, rollout.episodes()))
        return super().constrain(rollout)

    def _violation(self) -> float:
        budget = self.budget_of_sums()
        return float(np.clip((np.mean(self._sums) - budget) / max(budget, 1e-6), -1.0, 1.0))

    def _doubt(self, inputs: np.ndarray, mean: np.ndarray, var: np.ndarray, score: float) -> float:
        """Nearness to the boundary, P (1 - P) (ours; the release draws at random)."""
        return score * (1.0 - score)

    def _metrics(self, fresh: list[Any], loss: float | None) -> dict[str, Any]:
        mean = float(np.mean(self._sums)) if self._sums else None
        return {
            **super()._metrics(fresh, loss),
            "learned_cost": mean,
            "learned_budget": self.budget_of_sums() if self.active else None,
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "recent_sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._sums.extend(state["recent_sums"])
