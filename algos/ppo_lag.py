"""PPO-Lagrangian with the true cost and a known budget: the oracle for learned constraints."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.errors import UserError
from rollouts.trajectories import EnvSpec, Rollout
from trainers.control import Constraint, ControlAlgorithm
from trainers.multiplier import Multiplier, MultiplierConfig


@dataclass(kw_only=True)
class PPOLagConfig:
    """Constraint: the mean true cost of an episode is at most `budget`."""

    name: str = "ppo_lag"
    budget: float = 25.0  # cost an episode
    multiplier: MultiplierConfig = field(default_factory=MultiplierConfig)
    window_episodes: int = 32  # latest episodes whose mean cost is compared with the budget


class PPOLag(ControlAlgorithm):
    """max E[return] subject to E[cost of an episode] <= d (Ray, Achiam and Amodei 2019, section 5).

    The violation the multiplier sees is clip((mean cost - d) / max(d, 1), -1, 1).
    """

    Config = PPOLagConfig
    uses_true_cost = True
    constrained = True
    headline = (("multiplier", "multiplier"),)

    def __init__(self, config: PPOLagConfig, spec: EnvSpec, seed: int):
        super().__init__(config, spec, seed)
        self.multiplier = Multiplier(config.multiplier)
        self._recent: deque[float] = deque(maxlen=config.window_episodes)

    @classmethod
    def check(cls, cfg: Any) -> None:
        if cfg.algo.window_episodes < 1:
            raise UserError(
                "algo.window_episodes is too small",
                given=cfg.algo.window_episodes,
                allowed="at least 1",
            )

    def constrain(self, rollout: Rollout) -> Constraint:
        costs = rollout.costs
        assert costs is not None, "the engine shows the true cost to uses_true_cost algorithms"
        self._recent.extend(rollout.episode_sums(costs, rollout.episodes()))
        if self._recent:
            self.multiplier.update(violation(float(np.mean(self._recent)), self.config.budget))
        return Constraint(costs, self.multiplier.value)

    def state_dict(self) -> dict[str, Any]:
        return {"multiplier": self.multiplier.state_dict(), "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.multiplier.load_state_dict(state["multiplier"])
        self._recent = deque(state["recent"], maxlen=self.config.window_episodes)


def violation(mean_cost: float, budget: float) -> float:
    """How far the mean cost is over the budget, in budgets, clipped to [-1, 1]; positive when over."""
    return float(np.clip((mean_cost - budget) / max(budget, 1.0), -1.0, 1.0))
