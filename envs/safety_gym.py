"""Safety-Gymnasium's tasks as Gymnasium environments, in process.

Boundary: single-agent velocity and navigation tasks with vector observations, as five-tuple environments
with the cost in `info["cost"]`. Importing this module registers their ids with Gymnasium and loads neither
mujoco nor safety_gymnasium; both load when the first environment is built (safety_gym_compat.py has what that
takes).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import re
import threading
from typing import Any, ClassVar

import gymnasium
import numpy as np

from envs import safety_gym_compat
from envs.errors import UserError, nearest

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
    """A task of Safety-Gymnasium: its id, its own horizon in steps, whether any state of it has a cost."""

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
        what = f"{task_id!r} is not supported: safety-gymnasium 1.0.0 lacks its floor's texture"
    elif re.fullmatch(r"Safety\w+(Vision|Debug)-v0", task_id):
        what = f"{task_id!r} is not supported: only the variants with vector observations are"
        fix = f"env.id={re.sub('(Vision|Debug)', '', task_id)}"
    elif task_id in gymnasium.registry:
        what, fix = f"{task_id!r} is not a Safety-Gymnasium task", f"env=gym env.id={task_id}"
    raise UserError(what, allowed="nearest: " + ", ".join(nearest(task_id, TASKS, n=5)), fix=fix)


@functools.cache
def _velocity_class(task: Task) -> type[gymnasium.Env]:
    import mujoco

    robot = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", task.robot).lower()
    version = task.id.rpartition("-")[2]
    module = importlib.import_module(
        f"safety_gymnasium.tasks.safe_velocity.safety_{robot}_velocity_{version}"
    )
    base: Any = getattr(module, f"Safety{task.robot}VelocityEnv")

    class VelocityEnv(base):
        metadata: ClassVar = {**base.metadata, "render_modes": list(RENDER_MODES)}
        seedbed_has_cost = task.has_cost

        def set_state(self, qpos, qvel):
            # A reset perturbs the quaternions of Ant and Humanoid. MuJoCo 2 normalised them in place, and so
            # the tasks observed them; MuJoCo 3 leaves them alone.
            mujoco.mj_normalizeQuat(self.model, qpos)
            super().set_state(qpos, qvel)

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
def _navigation_class(task: Task) -> type[gymnasium.Env]:
    from safety_gymnasium.builder import Builder
    from safety_gymnasium.world import World

    class NavigationEnv(Builder):
        metadata: ClassVar = {**Builder.metadata, "render_modes": list(RENDER_MODES)}
        seedbed_has_cost = task.has_cost

        def __init__(
            self,
            render_mode: str | None = None,
            width: int = 256,
            height: int = 256,
            camera_id: int | None = None,
            camera_name: str | None = None,
        ):
            if camera_id is None and camera_name is None:
                camera_name = "track"  # follows the agent from outside; theirs is its own view
            config = {"agent_name": task.robot}
            super().__init__(task.id, config, render_mode, width, height, camera_id, camera_name)
            self.task.num_steps = math.inf  # Gymnasium's TimeLimit counts the steps
            # A world from the start: theirs, made at the first reset, does one mj_forward less there than at
            # later resets, and warm-starts the solver from another point.
            world_class = _textureless_world() if render_mode is None else World
            self.task.world = world_class(self.task.agent, self.task._obstacles)

        def set_seed(self, seed: int | None = None) -> None:
            # Theirs draws from NumPy's global generator, which belongs to the program.
            super().set_seed(int(self.np_random.integers(2**32)) if seed is None else seed)

        def reset(self, *, seed: int | None = None, options: dict | None = None):
            gymnasium.Env.reset(self, seed=seed)
            if seed is not None and seed >= 2**32:  # more than their RandomState takes
                seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
            return super().reset(seed=seed)

        def step(self, action):
            observation, reward, cost, terminated, truncated, info = super().step(np.asarray(action))
            info["cost"] = float(cost)
            return observation, reward, terminated, truncated, info

        def close(self) -> None:
            for viewer in self.task._viewers.values():
                viewer.free()
            self.task._viewers.clear()

    return NavigationEnv


def build(task: str, render_mode: str | None = None, **options: Any) -> gymnasium.Env:
    """The bare five-tuple environment of that id (no time limit); `options` go to its constructor.

    `info["cost"]` is the step's cost as a float, `reset(seed=s)` starts the same episode whatever came
    before, and `seedbed_has_cost` says whether any cost can occur. Raises UserError for what cannot be built.
    """
    if render_mode not in (None, *RENDER_MODES):
        raise UserError("unknown render_mode", given=render_mode, allowed=RENDER_MODES)
    with _lock:
        creator = load_class(task)
        with safety_gym_compat.construction():
            return creator(render_mode=render_mode, **options)


def load_class(task_id: str) -> type[gymnasium.Env]:
    """The environment class behind an id; imports Safety-Gymnasium."""
    task = check_task(task_id)
    safety_gym_compat.load()
    return _velocity_class(task) if task.kind == "velocity" else _navigation_class(task)


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
