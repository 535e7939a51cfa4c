"""Safety-Gymnasium 1.0.0 in process on today's Gymnasium, MuJoCo and NumPy: a layer, one small function per break.

Boundary: single-agent velocity and navigation tasks with vector observations, as five-tuple Gymnasium
environments with the cost in `info["cost"]`. Importing this module registers their ids with Gymnasium and loads
neither mujoco nor safety_gymnasium; both load when the first environment is built. What must be patched while
Safety-Gymnasium is imported or an agent is constructed is undone afterwards; what stays is set in the package's
own namespaces only.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from envs.errors import UserError, nearest

INSTALL = "pip install --no-deps safety-gymnasium==1.0.0"
VELOCITY_ROBOTS = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Swimmer", "Humanoid")
NAVIGATION_ROBOTS = ("Point", "Car", "Ant", "Doggo", "Racecar")
# Task family -> (levels, steps per episode), as Safety-Gymnasium registers them.
NAVIGATION_FAMILIES = {
    "Goal": (3, 1000),
    "Button": (3, 1000),
    "Push": (3, 1000),
    "Circle": (3, 500),
    "Run": (1, 500),
    "FadingEasy": (3, 1000),
    "FadingHard": (3, 1000),
}
RENDER_MODES = ("rgb_array", "depth_array")
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of Safety-Gymnasium: its id, its own horizon in steps, and whether any state of it has a cost."""

    id: str
    horizon: int
    has_cost: bool
    robot: str
    kind: str  # "velocity" or "navigation"


def _tasks() -> dict[str, Task]:
    tasks = [
        Task(f"Safety{robot}Velocity-{version}", 1000, True, robot, "velocity")
        for version in ("v0", "v1")
        for robot in VELOCITY_ROBOTS
    ]
    for family, (levels, horizon) in NAVIGATION_FAMILIES.items():
        for level in range(levels):
            # At level 0 nothing is constrained, but Run has no other level and keeps its walls.
            has_cost = level > 0 or family == "Run"
            tasks += [
                Task(f"Safety{robot}{family}{level}-v0", horizon, has_cost, robot, "navigation")
                for robot in NAVIGATION_ROBOTS
            ]
    return {task.id: task for task in tasks}


TASKS = _tasks()


def check_task(task_id: str) -> Task:
    """The task of that id; needs neither mujoco nor safety_gymnasium.

    Raises UserError for an id that is unknown (with the nearest ones) or that this layer cannot build.
    """
    if task_id in TASKS:
        return TASKS[task_id]
    what, fix = f"unknown Safety-Gymnasium task {task_id!r}", None
    if re.fullmatch(r"Safety\w+Race\d-v0", task_id):
        what = (
            f"{task_id!r} cannot be built: the safety-gymnasium 1.0.0 wheel lacks a texture of the Race tasks"
        )
    elif re.fullmatch(r"Safety\w+(Vision|Debug)-v0", task_id):
        what = f"{task_id!r} is not supported: only the variants with vector observations are"
        fix = f"env.id={re.sub('(Vision|Debug)', '', task_id)}"
    elif task_id in gymnasium.registry:
        what, fix = f"{task_id!r} is not a Safety-Gymnasium task", f"env=gym env.id={task_id}"
    raise UserError(what, allowed="nearest: " + ", ".join(nearest(task_id, TASKS, n=5)), fix=fix)


def check_installed() -> None:
    """Raises UserError with the command that installs Safety-Gymnasium if it is missing or another version."""
    if importlib.util.find_spec("safety_gymnasium") is None:
        raise UserError(
            "the package safety-gymnasium is not installed", fix=f"{INSTALL}  (its own pins clash with Ray's)"
        )
    version = importlib.metadata.version("safety-gymnasium")
    if version != "1.0.0":
        raise UserError(
            "this version of safety-gymnasium is not supported", given=version, allowed="1.0.0", fix=INSTALL
        )


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
    # Gymnasium 1.0 moved these wrappers; gymnasium_robotics serves the multi-agent tasks only, and its pins clash.
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
        for name in cls.__dict__.get("__annotations__", {}):
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


@functools.cache
def _load() -> None:
    check_installed()
    try:
        with _moved_modules(), _array_defaults_in_dataclasses(), _untouched_registry():
            import safety_gymnasium  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"safety-gymnasium needs the package {error.name!r}, which is not installed",
            fix="install what it imports: pip install 'mujoco>=3.3,<4' imageio xmltodict pyyaml packaging 'pygame>=2.6'",
        ) from error
    _accept_scalars_as_arrays()
    _give_viewer_its_size()


@functools.cache
def _velocity_class(task_id: str) -> type[gymnasium.Env]:
    name, version = re.fullmatch(r"Safety(\w+)Velocity-(v\d)", task_id).groups()
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    module = importlib.import_module(
        f"safety_gymnasium.tasks.safe_velocity.safety_{snake}_velocity_{version}"
    )
    base = getattr(module, f"Safety{name}VelocityEnv")

    class VelocityEnv(base):
        metadata = {**base.metadata, "render_modes": list(RENDER_MODES)}
        seedbed_has_cost = True

        def step(self, action):
            observation, reward, cost, terminated, truncated, info = super().step(action)
            info["cost"] = cost
            return observation, reward, terminated, truncated, info

    return VelocityEnv


@functools.cache
def _textureless_world() -> type:
    # Decoding textures is nearly all of a reset's cost, and only a renderer looks at them.
    from safety_gymnasium.world import World

    class TexturelessWorld(World):
        """Compiles its XML without textures; physics, sensors and lidar don't depend on them."""

        @property
        def xml_string(self):
            return self._xml_string

        @xml_string.setter
        def xml_string(self, xml):
            self._xml_string = xml and re.sub(r"<texture\b.*?</texture>| texture=\"[^\"]*\"", "", xml)

    return TexturelessWorld


@functools.cache
def _navigation_class() -> type[gymnasium.Env]:
    from safety_gymnasium.builder import Builder

    class NavigationEnv(Builder):
        metadata = {**Builder.metadata, "render_modes": list(RENDER_MODES)}

        def __init__(self, task: Task, render_mode: str | None = None, **options: Any):
            super().__init__(task.id, {"agent_name": task.robot}, render_mode, **options)
            self.seedbed_has_cost = task.has_cost
            self.task.num_steps = math.inf  # Gymnasium's TimeLimit counts the steps
            if render_mode is None:
                self.task.world = _textureless_world()(self.task.agent, self.task._obstacles)

        def set_seed(self, seed: int | None = None) -> None:
            # Theirs draws from NumPy's global generator, which belongs to the program.
            super().set_seed(int(self.np_random.integers(2**32)) if seed is None else seed)

        def reset(self, *, seed: int | None = None, options: dict | None = None):
            gymnasium.Env.reset(self, seed=seed)
            if seed is not None and seed >= 2**32:  # more than their RandomState takes
                seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
            return super().reset(seed=seed)

        def step(self, action):
            observation, reward, cost, terminated, truncated, info = super().step(action)
            info["cost"] = float(cost)
            return observation, reward, terminated, truncated, info

        def close(self) -> None:
            for viewer in self.task._viewers.values():
                viewer.free()
            self.task._viewers.clear()

    return NavigationEnv


def build(task: str, render_mode: str | None = None, **options: Any) -> gymnasium.Env:
    """The bare five-tuple environment of that id (no time limit); `options` go to its constructor.

    `info["cost"]` is the step's cost as a float, `reset(seed=s)` starts the same episode whatever came before,
    and `seedbed_has_cost` says whether any cost can occur. Raises UserError for what cannot be built.
    """
    entry = check_task(task)
    if render_mode not in (None, *RENDER_MODES):
        raise UserError("unknown render_mode", given=render_mode, allowed=RENDER_MODES)
    with _lock:
        creator = load_class(task)
        if entry.kind == "velocity":
            return creator(render_mode=render_mode, **options)
        with _joints_by_array_index():
            return creator(entry, render_mode, **options)


def load_class(task_id: str) -> type[gymnasium.Env]:
    """The environment class behind an id; imports Safety-Gymnasium."""
    _load()
    return _velocity_class(task_id) if check_task(task_id).kind == "velocity" else _navigation_class()


def _register() -> None:
    for task in TASKS.values():
        if task.id not in gymnasium.registry:
            gymnasium.register(
                task.id,
                entry_point="envs.safety_gym:build",
                max_episode_steps=task.horizon,
                kwargs={"task": task.id},
            )


_register()
