"""What makes Safety-Gymnasium 1.0.0 run on today's Python, Gymnasium, MuJoCo and NumPy, break by break.

Boundary: patches only; the environments are built in `envs/safety_gym.py`. Context managers are undone when
their block ends. The other functions change names in Safety-Gymnasium's own modules, for good.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from envs.errors import UserError

INSTALL = "pip install --no-deps safety-gymnasium==1.0.0"


def check_installed() -> None:
    """Raises UserError, with the command to install it, if Safety-Gymnasium 1.0.0 is not installed."""
    if importlib.util.find_spec("safety_gymnasium") is None:
        raise UserError(
            "the package safety-gymnasium is not installed", fix=f"{INSTALL}  (its own pins clash with Ray's)"
        )
    version = importlib.metadata.version("safety-gymnasium")
    if version != "1.0.0":
        raise UserError(
            "this version of safety-gymnasium is not supported", given=version, allowed="1.0.0", fix=INSTALL
        )


@functools.cache
def load() -> None:
    """Imports Safety-Gymnasium, once, patched. Raises UserError if it or a package it imports is missing."""
    check_installed()
    try:
        with _moved_modules(), _array_defaults_in_dataclasses(), _untouched_registry():
            import safety_gymnasium  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"safety-gymnasium needs the package {error.name!r}, which is not installed",
            fix="pip install 'mujoco>=3.3,<4' imageio xmltodict pyyaml packaging 'pygame>=2.6'",
        ) from error
    _accept_scalars_as_arrays()
    _give_viewer_its_size()
    _sample_layouts_in_floats()


@contextlib.contextmanager
def construction() -> Iterator[None]:
    """The patches under which an environment is constructed."""
    with _joints_by_array_index(), _quiet_construction():
        yield


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _moved_modules() -> Iterator[None]:
    # Gymnasium 1.0 moved these wrappers; gymnasium_robotics serves only the multi-agent tasks.
    from gymnasium.wrappers import common, stateful_observation, stateful_reward, utils

    contents = {
        "gymnasium.wrappers.autoreset": {"AutoResetWrapper": common.Autoreset},
        "gymnasium.wrappers.compatibility": {"EnvCompatibility": None},
        "gymnasium.wrappers.env_checker": {"PassiveEnvChecker": common.PassiveEnvChecker},
        "gymnasium.wrappers.normalize": {
            "NormalizeObservation": stateful_observation.NormalizeObservation,
            "NormalizeReward": stateful_reward.NormalizeReward,
            "RunningMeanStd": utils.RunningMeanStd,
        },
        "gymnasium.wrappers.time_limit": {"TimeLimit": common.TimeLimit},
        "gymnasium_robotics": {},
        "gymnasium_robotics.envs": {},
        "gymnasium_robotics.envs.multiagent_mujoco": {},
        "gymnasium_robotics.envs.multiagent_mujoco.mujoco_multi": {"MultiAgentMujocoEnv": object},
    }
    before = {name: sys.modules.get(name) for name in contents}
    for name, attributes in contents.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextlib.contextmanager
def _array_defaults_in_dataclasses() -> Iterator[None]:
    # Since Python 3.11 a dataclass refuses unhashable defaults, which Safety-Gymnasium's NumPy colours are.
    original = dataclasses.dataclass

    def dataclass(cls: type | None = None, /, **options: Any):
        if cls is None:
            return functools.partial(dataclass, **options)
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, np.ndarray):
                factory = functools.partial(copy.deepcopy, default)
                setattr(cls, name, dataclasses.field(default_factory=factory))
        return original(cls, **options)

    with _set(dataclasses, "dataclass", dataclass):
        yield


@contextlib.contextmanager
def _untouched_registry() -> Iterator[None]:
    # Its import registers six-tuple environments, which its own `make` can no longer build, under our ids.
    before = dict(gymnasium.registry)
    gymnasium.registry.clear()
    try:
        yield
    finally:
        gymnasium.registry.clear()
        gymnasium.registry.update(before)


@contextlib.contextmanager
def _joints_by_array_index() -> Iterator[None]:
    # MuJoCo's sensor().objid is a one-element array, which MjModel.jnt() no longer takes as an index.
    import mujoco

    original = mujoco.MjModel.jnt

    def jnt(self, key=None):
        return original(self, int(key.item()) if isinstance(key, np.ndarray) else key)

    with _set(mujoco.MjModel, "jnt", jnt):
        yield


@contextlib.contextmanager
def _quiet_construction() -> Iterator[None]:
    # Gymnasium's own HalfCheetah uses a deprecated attribute: MuJoCo says so at each construction, on screen
    # and in a file in the working directory. And a float32 bound of a float64 Box overflows when checked.
    import mujoco

    before = mujoco.get_mju_user_warning()

    def warn(message: str) -> None:
        if "settotalmass" not in message:
            (before or gymnasium.logger.warn)(message)

    mujoco.set_mju_user_warning(warn)
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        mujoco.set_mju_user_warning(before)


def _accept_scalars_as_arrays() -> None:
    # NumPy 2.4: float() refuses one-element arrays, and Ant's and Doggo's joint sensors are such. The only
    # float() that this module of theirs calls is applied to them.
    from safety_gymnasium.bases import base_agent

    base_agent.float = np.ndarray.item


def _give_viewer_its_size() -> None:
    # Gymnasium 1.0 wants the frame's width and height, which the older viewer took from the model.
    from gymnasium.envs.mujoco.mujoco_rendering import OffScreenViewer
    from safety_gymnasium.bases import underlying

    class Viewer(OffScreenViewer):
        opengl_context = None

        def __init__(self, model, data):
            size = model.vis.global_
            super().__init__(model, data, int(size.offwidth), int(size.offheight))

        def free(self):
            # Called by close() and again when deleted; a context may be freed only once.
            context, self.opengl_context = self.opengl_context, None
            if context is not None:
                context.free()

    underlying.OffScreenViewer = Viewer


def _sample_layouts_in_floats() -> None:
    # Crowded tasks (Button2, Push2) reject thousands of placements a reset; NumPy on two-element arrays made
    # that 0.3 s. Python floats with the same draws and the same arithmetic give the same layouts, faster.
    from safety_gymnasium.utils.random_generator import RandomGenerator

    def sample_layout(self) -> bool:
        layout: dict[str, np.ndarray] = {}
        placed: list[tuple[float, float, float]] = []
        for name, (placements, keepout) in self.placements.items():
            for _ in range(100):
                x, y = xy = self.draw_placement(placements, keepout)
                if all(
                    math.sqrt((x - u) * (x - u) + (y - v) * (y - v))
                    >= other + self.placements_margin + keepout
                    for u, v, other in placed
                ):
                    break
            else:
                return False
            layout[name] = xy
            placed.append((x, y, keepout))
        self.layout = layout
        return True

    RandomGenerator.sample_layout = sample_layout
