"""Hidden constraints that depend on the past, over any environment: its own cost is replaced.

Written as a kind with two cost functions of envs/costs.py behind slashes:

    latch/A/B      after a step with A > 0 every later step costs B, earlier ones nothing

for example latch/x_velocity_above:2.5/x_velocity_above:1.5 (fast once, and from then on half as fast is too
fast). Whether A has happened is in no observation, so what a step costs does not follow from the step: a cost
learned without memory cannot tell, and an episode that never does A may do B for free.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from envs.costs import CostFunction, make_cost
from envs.errors import UserError, nearest

KINDS = {"latch": ("latch/A/B", 2)}  # kind -> (spelling, number of cost functions)


def parse_hidden_cost(spec: str) -> tuple[str, list[CostFunction]]:
    """(kind, its cost functions) of what `env.hidden_cost` says. Raises UserError."""
    kind, *parts = spec.split("/")
    usage = [spelling for spelling, _ in KINDS.values()]
    if kind not in KINDS:
        raise UserError(
            f"unknown kind of hidden cost {kind!r}; nearest: {nearest(kind, KINDS, 1)[0]}",
            given=f"env.hidden_cost={spec}",
            allowed=f"{', '.join(usage)}, where A and B are cost functions (see envs/costs.py)",
        )
    if len(parts) != KINDS[kind][1]:
        raise UserError(
            "env.hidden_cost has the wrong number of cost functions",
            given=spec,
            allowed=KINDS[kind][0],
            fix="for example env.hidden_cost=latch/x_velocity_above:2.5/x_velocity_above:1.5",
        )
    return kind, [make_cost(part) for part in parts]


class LatchedCost(gymnasium.Wrapper):
    """`info["cost"]` is B(obs, action, info) on every step after the first one with A > 0, else 0.

    The step with A > 0 itself is still free. A reset opens the latch.
    """

    seedbed_has_cost = True

    def __init__(self, env: gymnasium.Env, first: CostFunction, then: CostFunction):
        super().__init__(env)
        self.first, self.then = first, then
        self.latched = False

    def reset(self, **kwargs: Any):
        self.latched = False
        return self.env.reset(**kwargs)

    def step(self, action: np.ndarray):
        observation, reward, terminated, truncated, info = self.env.step(action)
        try:
            info["cost"] = float(self.then(observation, action, info)) if self.latched else 0.0
            self.latched = self.latched or self.first(observation, action, info) > 0
        except (KeyError, IndexError) as error:
            raise UserError(
                f"env.hidden_cost cannot be computed here: {error!r}",
                allowed=f"obs of shape {observation.shape}; info with {sorted(info)}",
            ) from error
        return observation, reward, terminated, truncated, info


def hide_cost(env: gymnasium.Env, spec: str) -> gymnasium.Env:
    """`env` with the hidden cost that `spec` names in the place of its own. Raises UserError."""
    _, (first, then) = parse_hidden_cost(spec)
    return LatchedCost(env, first, then)
