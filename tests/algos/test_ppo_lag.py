"""PPO-Lagrangian's constraint: the violation by hand, the window of episodes, what survives a restart."""

from __future__ import annotations

import numpy as np
import pytest

from algos.ppo_lag import PPOLag, PPOLagConfig, violation
from rollouts.trajectories import EnvSpec, Rollout
from trainers.multiplier import MultiplierConfig


def algorithm(**settings) -> PPOLag:
    spec = EnvSpec(obs_dim=3, action_low=-np.ones(2), action_high=np.ones(2), horizon=4)
    given = {"budget": 10.0, "multiplier": MultiplierConfig(init=0.5, lr=0.1), **settings}
    return PPOLag(PPOLagConfig(**given), spec, seed=0)


def rollout(episode_costs: list[float], rest: float = 0.0) -> Rollout:
    """One environment an episode of 4 steps that carries its cost in its third step; then one open step."""
    envs = len(episode_costs)
    costs = np.zeros((5, envs), np.float32)
    costs[2], costs[4] = episode_costs, rest
    truncated = np.zeros((5, envs), bool)
    truncated[3] = True
    empty = np.zeros((5, envs), np.float32)
    return Rollout(
        obs=np.zeros((6, envs, 3)),
        memory=np.zeros((6, envs, 0)),
        actions=empty[..., None],
        means=empty[..., None],
        executed=empty[..., None],
        rewards=empty,
        costs=costs,
        terminated=np.zeros_like(truncated),
        truncated=truncated,
        model_cost=empty,
        model_cost_var=empty,
        final_index=np.array([[3, e] for e in range(envs)]),
        final_obs=np.zeros((envs, 3)),
        final_memory=np.zeros((envs, 0)),
        version=(0, 0),
    )


@pytest.mark.parametrize(
    ("mean_cost", "budget", "expected"),
    [
        (25.0, 25.0, 0.0),
        (30.0, 25.0, 0.2),
        (20.0, 25.0, -0.2),
        (0.0, 25.0, -1.0),
        (50.0, 25.0, 1.0),
        (500.0, 25.0, 1.0),  # cut
        (0.3, 0.0, 0.3),  # a budget below 1 counts as 1 in the denominator
        (0.1, 0.5, -0.4),
        (9.0, 0.0, 1.0),
    ],
)
def test_violation(mean_cost: float, budget: float, expected: float) -> None:
    assert violation(mean_cost, budget) == pytest.approx(expected, abs=1e-12)


def test_the_multiplier_follows_the_mean_cost_of_whole_episodes() -> None:
    a = algorithm()
    r = rollout([14.0, 18.0], rest=1000.0)  # the open step counts for no episode
    constraint = a.constrain(r)
    assert constraint.multiplier == pytest.approx(0.5 + 0.1 * 0.6)  # mean 16 against 10
    assert constraint.costs is r.costs  # the cost critic sees every step, the open one too
    # The window still holds the first two: mean of 14, 18, 0, 0 is 8.
    assert a.constrain(rollout([0.0, 0.0])).multiplier == pytest.approx(0.56 - 0.1 * 0.2)


def test_the_window_forgets() -> None:
    a = algorithm(window_episodes=2)
    a.constrain(rollout([1000.0, 1000.0]))  # + 0.1
    assert a.constrain(rollout([10.0, 10.0])).multiplier == pytest.approx(0.6)  # exactly on the budget
    assert a.constrain(rollout([0.0, 20.0])).multiplier == pytest.approx(0.6)


def test_it_grows_over_the_budget_and_shrinks_to_zero_under_it() -> None:
    a = algorithm(window_episodes=4)
    over = [a.constrain(rollout([30.0])).multiplier for _ in range(10)]
    np.testing.assert_allclose(over, 0.5 + 0.1 * np.arange(1, 11))
    under = [a.constrain(rollout([0.0])).multiplier for _ in range(60)]
    assert min(np.diff(under)[4:]) >= -0.1 - 1e-12
    assert under[-1] == 0.0


def test_without_a_whole_episode_the_multiplier_waits() -> None:
    a = algorithm()
    r = rollout([99.0])
    r.truncated[:] = False
    assert a.constrain(r).multiplier == 0.5


def test_a_restored_one_goes_on_alike() -> None:
    first = algorithm(window_episodes=3)
    for cost in (30.0, 3.0, 12.0, 17.0):
        first.constrain(rollout([cost]))
    second = algorithm(window_episodes=3)
    second.constrain(rollout([500.0]))  # forgotten with the load
    second.load_state_dict(first.state_dict())
    for cost in (8.0, 15.0, 2.0):
        assert first.constrain(rollout([cost])).multiplier == second.constrain(rollout([cost])).multiplier


def test_it_declares_that_it_sees_the_true_cost() -> None:
    assert PPOLag.uses_true_cost
    assert PPOLag.constrained
    assert algorithm().memory_dim == 0
