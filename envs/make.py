"""One way to make every environment: a config in, a flat Box environment with `info["cost"]` out.

Boundary: construction and its checks. Importing this module loads no simulator (and not even Gymnasium).
"""

from __future__ import annotations

import copy
import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envs.errors import UserError, nearest

if TYPE_CHECKING:
    import gymnasium

KINDS = ("safety-gym", "gym")


@dataclass(kw_only=True)
class EnvConfig:
    """What to act in. `horizon` is in env steps; `options` are keywords of the environment's constructor."""

    kind: str = "safety-gym"  # safety-gym: a Safety-Gymnasium task; gym: any Gymnasium id
    id: str = "SafetyHalfCheetahVelocity-v1"
    horizon: int | None = 250  # None: the environment's own
    cost: str | None = None  # only for kind=gym: a cost function by name (envs/costs.py); None: cost 0
    hidden_cost: str | None = None  # one that depends on the past, for any environment (envs/hidden_costs.py)
    options: dict[str, Any] = field(default_factory=dict)


def env_has_cost(cfg: EnvConfig) -> bool:
    """Whether any step of the environment can have a cost other than 0."""
    if cfg.hidden_cost is not None:
        return True
    if cfg.kind == "gym":
        return cfg.cost is not None
    from envs.safety_gym import check_task

    return check_task(cfg.id).has_cost


def own_horizon(cfg: EnvConfig) -> int | None:
    """The horizon, in env steps, that the environment itself has. Raises UserError for an unknown id."""
    return _spec(cfg).max_episode_steps


def check_env_config(cfg: EnvConfig) -> None:
    """Raises UserError for whatever can be known to be wrong without building the environment."""
    if cfg.kind not in KINDS:
        raise UserError(
            "unknown env.kind",
            given=cfg.kind,
            allowed=KINDS,
            fix=f"env.kind={nearest(cfg.kind, KINDS, 1)[0]}",
        )
    if cfg.horizon is not None and (isinstance(cfg.horizon, bool) or cfg.horizon < 1):
        raise UserError(
            "env.horizon must be at least one step", given=cfg.horizon, allowed="an integer >= 1, or null"
        )
    spec = _spec(cfg)
    if cfg.kind == "safety-gym" and cfg.cost is not None:
        raise UserError(
            f"{cfg.id} has a cost of its own; env.cost is for env=gym", given=cfg.cost, fix="env.cost=null"
        )
    if cfg.cost is not None:
        from envs.costs import make_cost

        make_cost(cfg.cost)
    if cfg.hidden_cost is not None:
        from envs.hidden_costs import parse_hidden_cost

        parse_hidden_cost(cfg.hidden_cost)
    if cfg.horizon is None and spec.max_episode_steps is None:
        raise UserError(f"{cfg.id} sets no horizon of its own", fix="env.horizon=1000, for example")
    if cfg.options:
        _check_options(cfg, spec)


def make_env(cfg: EnvConfig, *, render_mode: str | None = None) -> gymnasium.Env:
    """The environment of `cfg`: Box spaces of one dimension, cut to the horizon, `info["cost"]` a float.

    `reset(seed=s)` starts the same episode on a used environment as on a fresh one.
    `env.get_wrapper_attr("seedbed_has_cost")` is False where the cost is always 0. Raises UserError.
    """
    check_env_config(cfg)
    import gymnasium

    spec = copy.deepcopy(_spec(cfg))
    # The checkers are for development; each costs a microsecond or more a step.
    spec.disable_env_checker, spec.order_enforce = True, False
    spec.max_episode_steps = cfg.horizon or spec.max_episode_steps
    mode = {} if render_mode is None else {"render_mode": render_mode}
    try:
        env = gymnasium.make(spec, **mode, **cfg.options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(f"{cfg.id} needs a package that is not installed: {error}") from error
    except (TypeError, AssertionError) as error:
        if missing := _required(cfg, spec) - cfg.options.keys() - spec.kwargs.keys():
            raise UserError(
                f"{cfg.id} cannot be built without {', '.join(sorted(missing))}",
                given=cfg.options or "no env.options",
                fix=" ".join(f"env.options.{name}=<value>" for name in sorted(missing)),
            ) from error
        if not cfg.options:
            raise
        raise UserError(
            f"{cfg.id} cannot be built with these env.options: {error}", given=cfg.options
        ) from error
    _check_spaces(cfg, env)
    if cfg.kind == "gym":
        from envs.costs import CostInInfo, make_cost

        env = CostInInfo(env, None if cfg.cost is None else make_cost(cfg.cost))
    if cfg.hidden_cost is not None:
        from envs.hidden_costs import hide_cost

        env = hide_cost(env, cfg.hidden_cost)
    return env


def _spec(cfg: EnvConfig) -> Any:
    import gymnasium

    from envs import safety_gym, safety_gym_compat

    if cfg.kind == "safety-gym":
        safety_gym_compat.check_installed()
        return gymnasium.registry[safety_gym.check_task(cfg.id).id]
    if cfg.id in safety_gym.TASKS:
        raise UserError(f"{cfg.id} is a Safety-Gymnasium task", fix=f"env=safety-gym env.id={cfg.id}")
    module, _, name = cfg.id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        known = [key for key in gymnasium.registry if key not in safety_gym.TASKS]
        raise UserError(
            f"unknown Gymnasium environment {cfg.id!r}: {error}",
            allowed="nearest: " + ", ".join(nearest(name, known, n=5)),
            fix="an id of your own is written module:Name-v0, where importing the module registers it",
        ) from error


def _creator(cfg: EnvConfig, spec: Any) -> Any:
    """The class or function that makes the environment."""
    import gymnasium

    if cfg.kind == "safety-gym":
        from envs.safety_gym import load_class

        return load_class(cfg.id)
    entry = spec.entry_point
    return entry if callable(entry) else gymnasium.envs.registration.load_env_creator(entry)


def _required(cfg: EnvConfig, spec: Any) -> set[str]:
    """The keywords that a Gymnasium id's constructor cannot do without."""
    if cfg.kind == "safety-gym":
        return set()  # its required ones are set by the task
    parameters = inspect.signature(_creator(cfg, spec)).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.default is p.empty and p.kind in named}


def _check_options(cfg: EnvConfig, spec: Any) -> None:
    names = _keywords(_creator(cfg, spec))
    if names is not None:
        names |= _required(cfg, spec)
    for name in cfg.options:
        if names is not None and name not in names:
            raise UserError(
                f"{cfg.id} takes no option {name!r}; nearest: {', '.join(nearest(name, names))}",
                given=cfg.options,
                allowed=sorted(names),
            )


def _keywords(creator: Any) -> set[str] | None:
    """The keywords a constructor takes, through **kwargs up its bases; None if it takes any."""
    functions = (
        [vars(cls)["__init__"] for cls in creator.__mro__[:-1] if "__init__" in vars(cls)]
        if inspect.isclass(creator)
        else [creator]
    )
    names: set[str] = set()
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        # What a constructor cannot do without is handed to it by the class above, not by the user.
        names |= {p.name for p in parameters if p.default is not p.empty}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names - {"render_mode"}
    return None


def _check_spaces(cfg: EnvConfig, env: gymnasium.Env) -> None:
    import numpy as np
    from gymnasium.spaces import Box

    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        flat = isinstance(space, Box) and len(space.shape) == 1
        if not flat or (name == "action" and not np.issubdtype(space.dtype, np.floating)):
            wanted = "a Box of one dimension" + (" of floats" if name == "action" else "")
            env.close()
            raise UserError(f"{cfg.id} has {name}s that are not supported", given=str(space), allowed=wanted)
    limits = env.action_space
    if not (np.isfinite(limits.low).all() and np.isfinite(limits.high).all()):
        env.close()
        raise UserError(
            f"{cfg.id} has actions without limits",
            given=str(limits),
            allowed="finite lower and upper limits: the policy acts in units of them",
            fix="wrap the environment so that its actions lie in [-1, 1]",
        )
