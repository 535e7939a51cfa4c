"""Constraints that remember: by hand on a scripted environment, and on a real task against the recursion."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from envs.errors import UserError
from envs.hidden_costs import LatchedCost
from envs.make import EnvConfig, check_env_config, env_has_cost, make_env
from launch import arguments, config


class Scripted(gymnasium.Env):
    """obs = [first, second] of the next row of a script, whatever the action is; its own cost is 5."""

    def __init__(self, script: tuple = ()):
        self.observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.script, self.t = script, 0

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray):
        self.t += 1
        return np.array(self.script[self.t - 1], np.float32), 1.0, False, False, {"cost": 5.0}


if "Scripted-v0" not in gymnasium.registry:
    gymnasium.register("Scripted-v0", Scripted)

LATCH = "latch/obs_above:0:1/obs_above:1:0"


def scripted(rows: list[tuple[float, float]]) -> gymnasium.Env:
    cfg = EnvConfig(
        kind="gym",
        id="Scripted-v0",
        horizon=len(rows),
        cost="info:cost",
        hidden_cost=LATCH,
        options={"script": tuple(rows)},
    )
    assert env_has_cost(cfg)
    return make_env(cfg)


def costs(env: gymnasium.Env, steps: int) -> list[float]:
    env.reset(seed=0)
    return [env.step(np.zeros(1, np.float32))[4]["cost"] for _ in range(steps)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # B alone costs nothing; A itself is free; B after A costs, also long after A has ended.
        ([(0, 1), (0, 1), (0, 1)], [0, 0, 0]),
        ([(2, 0), (0, 0), (0, 0)], [0, 0, 0]),
        ([(2, 1), (0, 0), (0, 1), (0, 0), (0, 1)], [0, 0, 1, 0, 1]),
        ([(0, 1), (2, 1), (2, 1), (0, 1)], [0, 0, 1, 1]),
        ([(1, 1), (0, 1)], [0, 0]),  # not above 1
    ],
)
def test_the_latch_by_hand(rows: list[tuple[float, float]], expected: list[float]) -> None:
    env = scripted(rows)
    assert costs(env, len(rows)) == expected
    assert costs(env, len(rows)) == expected  # a reset opens it
    assert env.get_wrapper_attr("seedbed_has_cost")


def test_the_same_step_costs_or_does_not() -> None:
    """What makes it non-Markov: equal observation and action, equal everything that a step shows."""
    quiet, marked = scripted([(0, 0), (0, 1)]), scripted([(2, 0), (0, 1)])
    for env in (quiet, marked):
        env.reset(seed=0)
        env.step(np.zeros(1))
    a, b = quiet.step(np.zeros(1)), marked.step(np.zeros(1))
    np.testing.assert_array_equal(a[0], b[0])
    assert (a[4]["cost"], b[4]["cost"]) == (0.0, 1.0)


def test_on_a_real_task_it_is_the_recursion() -> None:
    """flag_t = flag_{t-1} or v_t > 0.4, cost_t = flag_{t-1} and v_t > 0.1, from the velocities it reports."""
    cfg = EnvConfig(
        id="SafetyHopperVelocity-v1",
        horizon=200,
        hidden_cost="latch/x_velocity_above:0.4/x_velocity_above:0.1",
        options={"terminate_when_unhealthy": False},
    )
    env = make_env(cfg)
    rng, seen = np.random.default_rng(0), set()
    for seed in range(6):
        env.reset(seed=seed)
        flag = False
        for _ in range(200):
            _, _, _, truncated, info = env.step(rng.uniform(-1, 1, 3).astype(np.float32))
            v = info["x_velocity"]
            assert info["cost"] == float(flag and v > 0.1)
            seen.add((flag, bool(v > 0.1)))
            flag = flag or v > 0.4
        assert truncated
    assert len(seen) == 4


def test_it_changes_nothing_else() -> None:
    plain, hidden = (
        make_env(EnvConfig(hidden_cost=spec)) for spec in (None, "latch/info:cost/x_velocity_above:0")
    )
    for env in (plain, hidden):
        env.action_space.seed(0)
    actions = [plain.action_space.sample() for _ in range(50)]
    np.testing.assert_array_equal(plain.reset(seed=1)[0], hidden.reset(seed=1)[0])
    for action in actions:
        a, b = plain.step(action), hidden.step(action)
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:4] == b[1:4]


def test_it_is_cheap() -> None:
    """A microsecond or two a step; ten are allowed on a busy machine."""
    rows = [(0.0, 1.0)] * 20_000
    cfg = EnvConfig(kind="gym", id="Scripted-v0", horizon=len(rows), options={"script": tuple(rows)})
    bare = make_env(cfg)
    env = LatchedCost(bare, lambda o, a, i: float(o[0] > 1), lambda o, a, i: float(o[1] > 0))
    seconds = []
    for e in (bare, env):
        e.reset(seed=0)
        action = np.zeros(1, np.float32)
        started = time.perf_counter()
        for _ in range(len(rows)):
            e.step(action)
        seconds.append(time.perf_counter() - started)
    assert (seconds[1] - seconds[0]) / len(rows) < 10e-6


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (
            "lach/obs_above:0:1/obs_above:1:0",
            ["unknown kind of hidden cost 'lach'; nearest: latch", "latch/A/B"],
        ),
        ("latch/obs_above:0:1", ["the wrong number of cost functions", "latch/A/B", "x_velocity_above:2.5"]),
        ("latch/obs_above:0:1/obs_abov:1:0", ["unknown cost function 'obs_abov'; nearest: obs_above"]),
        ("latch/obs_above:0/obs_above:1:0", ["wrong arguments", "obs_above:INDEX(int):LIMIT(float)"]),
    ],
)
def test_what_is_not_a_hidden_cost_is_refused_without_an_environment(spec: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_env_config(EnvConfig(hidden_cost=spec))
    for part in parts:
        assert part in str(caught.value)


def test_what_the_environment_does_not_report_is_named() -> None:
    env = make_env(EnvConfig(hidden_cost="latch/info:cost_hazards/info:cost", horizon=5))
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"env\.hidden_cost cannot be computed here: KeyError") as caught:
        env.step(np.zeros(6, np.float32))
    assert "x_velocity" in str(caught.value)


def test_it_can_be_typed() -> None:
    spec = "latch/x_velocity_above:2.5/x_velocity_above:1.5"
    line = arguments.read(["algo=ppo", f"env.hidden_cost={spec}"]).argv
    assert config.compose(line).env.hidden_cost == spec
