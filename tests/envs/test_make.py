"""make_env: its contract for both kinds, and the messages for bad input."""

import importlib.util
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from envs.errors import UserError
from envs.make import EnvConfig, check_env_config, env_has_cost, make_env


class Reporting(gymnasium.Env):
    """Three numbers in, the sum of the action out; reports a cost itself."""

    def __init__(self, dtype="float32", obs="box", limit=1.0):
        self.action_space = gymnasium.spaces.Box(-limit, limit, (2,), np.dtype(dtype))
        box = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
        self.observation_space = {"box": box, "dict": gymnasium.spaces.Dict(a=box)}[obs]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.ones(3, np.float32), float(action.sum()), False, False, {"hurt": 2}


class Sized(Reporting):
    """Cannot be built without its `size`, the number of actions."""

    def __init__(self, size, *, gain, **kwargs):
        super().__init__(**kwargs)
        self.action_space = gymnasium.spaces.Box(-gain, gain, (size,), np.float32)


gymnasium.register("Reporting-v0", entry_point=Reporting)
gymnasium.register("Sized-v0", entry_point=Sized, kwargs={"gain": 2.0})


def gym(id="Reporting-v0", **fields):
    return EnvConfig(kind="gym", id=id, **{"horizon": 7, **fields})


def test_importing_make_loads_nothing_heavy_and_a_check_no_simulator():
    code = """
import sys
def loaded(*names):
    return [name for name in names if name in sys.modules]
from envs.make import EnvConfig, check_env_config
assert not loaded("gymnasium", "numpy", "mujoco", "safety_gymnasium", "torch", "ray"), loaded("gymnasium")
check_env_config(EnvConfig())
assert not loaded("mujoco", "safety_gymnasium", "torch", "ray")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_default_is_the_half_cheetah_cut_to_250_steps_without_checkers():
    env = make_env(EnvConfig())
    assert env.spec.id == "SafetyHalfCheetahVelocity-v1"
    assert isinstance(env, gymnasium.wrappers.TimeLimit)
    assert env.env is env.unwrapped  # nothing else between the limit and the simulator
    obs, _ = env.reset(seed=0)
    assert obs.dtype == env.observation_space.dtype
    truncated = [env.step(np.zeros(6, np.float32))[3] for _ in range(250)]
    assert truncated.index(True) == 249


def test_horizon_none_is_the_tasks_own():
    assert make_env(EnvConfig(horizon=None)).spec.max_episode_steps == 1000
    assert make_env(gym("Pendulum-v1", horizon=None)).spec.max_episode_steps == 200
    assert make_env(gym("Pendulum-v1", horizon=9)).spec.max_episode_steps == 9


def test_options_that_the_constructor_needs_reach_it():
    env = make_env(gym("Sized-v0", options={"size": 5}))
    assert env.action_space == gymnasium.spaces.Box(-2, 2, (5,), np.float32)
    env = make_env(gym("Sized-v0", options={"size": 1, "gain": 0.5, "limit": 3.0}))
    assert env.action_space == gymnasium.spaces.Box(-0.5, 0.5, (1,), np.float32)


def test_options_reach_the_constructor():
    hopper = EnvConfig(id="SafetyHopperVelocity-v1", options={"terminate_when_unhealthy": False})
    env = make_env(hopper)
    env.reset(seed=0)
    assert not any(env.step(np.ones(3, np.float32))[2] for _ in range(200))


@pytest.mark.parametrize(
    ("cost", "value", "has_cost"),
    [(None, 0.0, False), ("obs_above:1:0.5", 1.0, True), ("info:hurt", 2.0, True)],
)
def test_gymnasium_envs_have_their_cost_in_info(cost, value, has_cost):
    cfg = gym(cost=cost)
    env = make_env(cfg)
    env.reset(seed=0)
    *_, truncated, info = env.step(np.zeros(2, np.float32))
    assert info["cost"] == value
    assert isinstance(info["cost"], float)
    assert env.get_wrapper_attr("seedbed_has_cost") is has_cost is env_has_cost(cfg)
    assert [truncated, *(env.step(np.zeros(2, np.float32))[3] for _ in range(6))] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ("x_velocity_above:1", r"cannot be computed here: KeyError\('x_velocity'\)\n.*info with \['hurt'\]"),
        ("obs_above:3:0", r"cannot be computed here: IndexError.*\n.*obs of shape \(3,\)"),
    ],
)
def test_a_cost_that_the_env_cannot_feed(cost, message):
    env = make_env(gym(cost=cost))
    env.reset(seed=0)
    with pytest.raises(UserError, match=message):
        env.step(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (EnvConfig(kind="gim"), r"unknown env.kind\n.*'gim'\n.*safety-gym, gym\n.*fix: *env.kind=gym"),
        (EnvConfig(horizon=0), r"env.horizon must be at least one step\n.*given: *0"),
        (EnvConfig(horizon=-3), r"env.horizon must be at least one step"),
        (
            EnvConfig(id="SafetyHoperVelocity-v1"),
            r"unknown Safety-Gymnasium task 'SafetyHoperVelocity-v1'\n.*nearest: SafetyHopperVelocity-v1",
        ),
        (EnvConfig(id="Pendulum-v1"), r"not a Safety-Gymnasium task\n(.*\n)*.*env=gym env.id=Pendulum-v1"),
        (EnvConfig(id="SafetyCarRace0-v0"), r"not supported.*lacks its floor's texture"),
        (
            EnvConfig(id="SafetyCarGoal1Vision-v0"),
            r"only the variants with vector observations(.*\n)*.*env.id=SafetyCarGoal1-v0",
        ),
        (EnvConfig(cost="obs_above:0:1"), r"has a cost of its own.*\n(.*\n)*.*env.cost=null"),
        (
            EnvConfig(options={"ctrl_cost_wieght": 1}),
            r"takes no option 'ctrl_cost_wieght'; nearest: ctrl_cost_weight",
        ),
        (
            EnvConfig(id="SafetyCarGoal1-v0", options={"widht": 1}),
            r"takes no option 'widht'; nearest: width\b(.*\n)*.*camera_id, camera_name, height, width",
        ),
        (EnvConfig(options={"render_mode": "rgb_array"}), r"takes no option 'render_mode'"),
        (gym("Pendulm-v1"), r"unknown Gymnasium environment 'Pendulm-v1'.*\n.*nearest: Pendulum-v1"),
        (gym("no_such_module:Env-v0"), r"unknown Gymnasium environment.*No module named 'no_such_module'"),
        (gym("SafetyPointGoal1-v0"), r"is a Safety-Gymnasium task\n.*env=safety-gym"),
        (gym(cost="x_velocity:1"), r"unknown cost function 'x_velocity'; nearest: x_velocity_above"),
        (gym(horizon=None), r"sets no horizon of its own\n.*env.horizon="),
        (gym(options={"dtypes": "float64"}), r"takes no option 'dtypes'; nearest: dtype"),
        (gym("Sized-v0", options={"siz": 3}), r"takes no option 'siz'; nearest: size(.*\n)*.*gain, limit"),
        (gym("Sized-v0", options={"self": 3}), r"takes no option 'self'"),
    ],
)
def test_what_a_check_finds_without_building(cfg, message):
    with pytest.raises(UserError, match=message):
        check_env_config(cfg)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            gym("CartPole-v1"),
            r"CartPole-v1 has actions that are not supported\n.*Discrete\(2\)'\n.*a Box of one .* of floats",
        ),
        (gym(options={"dtype": "int32"}), r"actions that are not supported\n.*int32"),
        (gym(options={"limit": float("inf")}), r"actions without limits\n.*inf.*\n.*finite lower and upper"),
        (
            gym(options={"obs": "dict"}),
            r"observations that are not supported\n.*Dict\(.*\n.*a Box of one dim",
        ),
        (gym(options={"obs": 3, "dtype": "float32"}), None),
        (gym("Sized-v0"), r"without size\n.*'no env.options'\n.*env.options.size=<value>"),
        (gym("Sized-v0", options={"limit": 2}), r"without size\n.*\{'limit': 2\}"),
        (
            EnvConfig(options={"default_camera_config": {}}),
            r"cannot be built with these env.options: .*default_camera_config",
        ),
    ],
)
def test_what_only_building_finds(cfg, message):
    if message is None:  # an error of the environment's own is not dressed up
        with pytest.raises(KeyError):
            make_env(cfg)
        return
    with pytest.raises(UserError, match=message):
        make_env(cfg)


def test_safety_gymnasium_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed\n.*pip install --no-deps safety-gymnasium==1.0.0"):
        check_env_config(EnvConfig())


def test_another_version_of_safety_gymnasium(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.0")
    with pytest.raises(UserError, match=r"not supported\n.*'0.4.0'\n.*1.0.0\n.*pip install"):
        check_env_config(EnvConfig())
