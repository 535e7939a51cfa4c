"""PPO without a constraint: the engine with every seam left alone."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.control import ControlAlgorithm


@dataclass(kw_only=True)
class PPOConfig:
    """The budget is for the observer only: it draws the line in the plots and counts violations."""

    name: str = "ppo"
    budget: float = 25.0  # cost an episode


class PPO(ControlAlgorithm):
    """Proximal policy optimisation (Schulman et al. 2017); it maximises the return, whatever it costs."""

    Config = PPOConfig
