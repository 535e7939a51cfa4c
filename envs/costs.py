"""Cost functions by name for plain Gymnasium environments: pure functions (obs, action, info) -> float.

A cost is written as a name with its arguments behind colons, or as the import path of a function of your own:

    x_velocity_above:1.5      1 while info["x_velocity"] > 1.5 (Gymnasium's MuJoCo walkers report it)
    obs_above:0:0.9           1 while obs[0] > 0.9
    obs_below:0:-0.9          1 while obs[0] < -0.9
    abs_obs_above:2:5         1 while |obs[2]| > 5
    action_norm_above:0.5     1 while the Euclidean norm of the action > 0.5
    info_above:x_position:2   1 while info["x_position"] > 2
    info:cost                 info["cost"], from an environment that reports a cost itself
    my_package.costs:tilt     tilt(obs, action, info) of the module my_package.costs

`obs` is the observation that the step led to, `action` the action that was executed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from envs.errors import UserError, nearest

CostFunction = Callable[[np.ndarray, np.ndarray, dict[str, Any]], float]


def x_velocity_above(limit: float) -> CostFunction:
    """1 while info["x_velocity"] exceeds `limit` (m/s), else 0."""
    return lambda obs, action, info: float(info["x_velocity"] > limit)


def obs_above(index: int, limit: float) -> CostFunction:
    """1 while obs[index] > limit, else 0."""
    return lambda obs, action, info: float(obs[index] > limit)


def obs_below(index: int, limit: float) -> CostFunction:
    """1 while obs[index] < limit, else 0."""
    return lambda obs, action, info: float(obs[index] < limit)


def abs_obs_above(index: int, limit: float) -> CostFunction:
    """1 while |obs[index]| > limit, else 0."""
    return lambda obs, action, info: float(abs(obs[index]) > limit)


def action_norm_above(limit: float) -> CostFunction:
    """1 while the Euclidean norm of the action exceeds `limit`, else 0."""
    return lambda obs, action, info: float(np.linalg.norm(action) > limit)


def info_above(key: str, limit: float) -> CostFunction:
    """1 while info[key] > limit, else 0."""
    return lambda obs, action, info: float(info[key] > limit)


def info(key: str) -> CostFunction:
    """info[key], for an environment that reports a cost itself."""
    return lambda obs, action, info: float(info[key])


# Name -> (function of the arguments, their types and names).
COSTS: dict[str, tuple[Callable[..., CostFunction], dict[str, type]]] = {
    "x_velocity_above": (x_velocity_above, {"limit": float}),
    "obs_above": (obs_above, {"index": int, "limit": float}),
    "obs_below": (obs_below, {"index": int, "limit": float}),
    "abs_obs_above": (abs_obs_above, {"index": int, "limit": float}),
    "action_norm_above": (action_norm_above, {"limit": float}),
    "info_above": (info_above, {"key": str, "limit": float}),
    "info": (info, {"key": str}),
}


def usage() -> list[str]:
    """The spellings that `make_cost` takes."""
    named = [
        ":".join([name, *(argument.upper() for argument in types)]) for name, (_, types) in COSTS.items()
    ]
    return [*named, "module:function"]


def make_cost(spec: str) -> CostFunction:
    """The cost function that `spec` names (see the top of this file). Raises UserError if there is none."""
    name, *given = spec.split(":")
    if name not in COSTS:
        return _imported(spec)
    function, types = COSTS[name]
    try:
        if len(given) != len(types):
            raise ValueError
        return function(*(convert(text) for convert, text in zip(types.values(), given)))
    except ValueError:
        wanted = ":".join([name, *(f"{key.upper()}({kind.__name__})" for key, kind in types.items())])
        raise UserError("env.cost has wrong arguments", given=spec, allowed=wanted) from None


def _imported(spec: str) -> CostFunction:
    name, _, function = spec.partition(":")
    if not function.isidentifier():
        close = ", ".join(nearest(name, COSTS))
        raise UserError(f"unknown cost function {name!r}; nearest: {close}", given=spec, allowed=usage())
    try:
        found = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"env.cost names a function that cannot be imported: {error}",
            given=spec,
            allowed=usage(),
            fix=f"nearest named cost: {nearest(name, COSTS, n=1)[0]}; a module must be importable from here",
        ) from error
    if not callable(found):
        raise UserError("env.cost names something that cannot be called", given=spec)
    return found


class CostInInfo(gymnasium.Wrapper):
    """Puts a cost function's value into `info["cost"]` at each step; without a function the cost is 0."""

    def __init__(self, env: gymnasium.Env, cost: CostFunction | None):
        super().__init__(env)
        self.cost = cost
        self.seedbed_has_cost = cost is not None

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        try:
            info["cost"] = 0.0 if self.cost is None else self.cost(observation, action, info)
        except (KeyError, IndexError) as error:
            raise UserError(
                f"env.cost cannot be computed here: {error!r}",
                allowed=f"obs of shape {observation.shape}; info with {sorted(info)}",
            ) from error
        return observation, reward, terminated, truncated, info
