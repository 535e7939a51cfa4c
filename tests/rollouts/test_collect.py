"""The rollout loop on environments and cost models whose every number is known in advance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from envs.errors import UserError
from rollouts.collect import EVALUATION_STREAM, GaussianPolicy, NoCostModel, collect
from tests.rollouts.toys import Counter, Tally, random_policy

ACTIONS, OBS = 2, 3


def policy(memory: int = 0, **settings: Any) -> GaussianPolicy:
    return random_policy(OBS + memory, ACTIONS, OBS, **settings)


def play(envs: list[Counter], **settings: Any):
    given: dict[str, Any] = {"steps": 7, "seed": 3, "iteration": 0, **settings}
    acting = given.pop("policy", None) or policy(memory=2)
    return collect(envs, acting, given.pop("cost_model", Tally()), **given)


# -- the policy


def test_mean_by_hand() -> None:
    p = GaussianPolicy(
        layers=[
            (np.array([[1.0, -1.0], [0.5, 2.0]]), np.array([0.5, -3.0])),
            (np.array([[2.0, -1.0]]), np.array([0.25])),
        ],
        log_std=np.zeros(1),
        obs_mean=np.array([1.0, 2.0]),
        obs_std=np.array([2.0, 0.5]),
        action_low=np.array([-1.0]),
        action_high=np.array([3.0]),
        squash_mean=False,
    )
    np.testing.assert_array_equal(p.normalize(np.array([[2.0, 1.0]])), [[0.5, -2.0]])
    np.testing.assert_array_equal(p.normalize(np.array([[100.0, -100.0]])), [[5.0, -5.0]])
    assert p.normalize(np.array([[2.0, 1.0]])).dtype == np.float32
    # Hidden: 0.5 + 2 + 0.5 = 3 and 0.25 - 4 - 3 = -6.75.
    x = np.array([[0.5, -2.0]])
    expected = 2 * math.tanh(3.0) - math.tanh(-6.75) + 0.25
    assert p.mean(x)[0, 0] == pytest.approx(expected, rel=1e-12)
    p.squash_mean = True
    assert p.mean(x)[0, 0] == pytest.approx(math.tanh(expected), rel=1e-12)
    p.activation = "relu"
    assert p.mean(x)[0, 0] == pytest.approx(math.tanh(2 * 3.0 - 0.0 + 0.25), rel=1e-12)
    np.testing.assert_array_equal(x, [[0.5, -2.0]])  # the input is left as it was


@pytest.mark.parametrize(("action", "executed"), [(-1, -2), (0, 0.5), (1, 3), (0.5, 1.75), (9, 3), (-9, -2)])
def test_to_env_clips_and_scales(action: float, executed: float) -> None:
    np.testing.assert_array_equal(policy().to_env(np.full((1, 2), action)), np.full((1, 2), executed))


# -- the recording


def test_what_is_recorded_is_what_happened() -> None:
    """Every array of the rollout, retold from the environment's rules and the recorded noise."""
    envs = [Counter((3, 2, 9), terminating=(1,)), Counter((9,)), Counter((7,), terminating=(0,))]
    p = policy(memory=2)
    r = play(envs, policy=p, version=(2, 5))
    assert r.shape == (7, 3)
    assert r.version == (2, 5)
    at = r.obs[:, :, 1]  # steps taken in the episode
    np.testing.assert_array_equal(at[:, 0], [0, 1, 2, 0, 1, 0, 1, 2])
    np.testing.assert_array_equal(at[:, 1], [0, 1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(at[:, 2], [0, 1, 2, 3, 4, 5, 6, 0])
    np.testing.assert_array_equal(r.rewards[:, 0], [1, 2, 3, 101, 102, 201, 202])
    np.testing.assert_array_equal(r.costs[:, 0], [1, 2, 3, 10_001, 10_002, 20_001, 20_002])
    np.testing.assert_array_equal(np.argwhere(r.truncated), [[2, 0]])
    np.testing.assert_array_equal(np.argwhere(r.terminated), [[4, 0], [6, 2]])
    np.testing.assert_array_equal(r.final_index, [[2, 0], [4, 0], [6, 2]])
    # The last states of the ended episodes, not the first ones of the next.
    np.testing.assert_array_equal(r.final_obs[:, 1], [3, 2, 7])
    for k, (t, e) in enumerate(r.final_index):
        assert r.final_obs[k, 0] == r.obs[t, e, 0] != r.obs[t + 1, e, 0]  # the episode's start value
        assert r.final_obs[k, 2] == r.executed[t, e, 0]
    # The memory counts steps and executed actions, and starts at zero in every episode.
    np.testing.assert_array_equal(r.memory[:, :, 0], at)
    np.testing.assert_array_equal(r.final_memory[:, 0], r.final_obs[:, 1])
    total = r.executed.sum(-1)
    expected = [total[0:3, 0].sum(), total[3:5, 0].sum(), total[:, 2].sum()]
    np.testing.assert_allclose(r.final_memory[:, 1], expected, rtol=1e-6)
    np.testing.assert_allclose(r.memory[1:, 1, 1], np.cumsum(total[:, 1]), rtol=1e-5, atol=1e-6)
    # The cost model's answers: its sum and its step count, both after the step.
    np.testing.assert_allclose(r.model_cost[:, 1], np.cumsum(total[:, 1]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(r.model_cost_var, at[:-1] + 1)
    # Actions: the mean of the state and memory before the step, clipped and scaled only for the environment.
    np.testing.assert_array_equal(r.executed, p.to_env(r.actions).astype(np.float32))
    for e, env in enumerate(envs):
        np.testing.assert_array_equal(np.stack(env.given), r.executed[:, e])
    for t in range(7):
        inputs = np.concatenate([p.normalize(r.obs[t]), r.memory[t]], 1)
        np.testing.assert_allclose(r.means[t], p.mean(inputs), rtol=0, atol=1e-6)


def test_only_the_first_reset_is_seeded() -> None:
    env = Counter((2,))
    play([env])
    assert isinstance(env.seeds[0], int)
    assert env.seeds[1:] == [None, None, None]


def test_an_environment_that_reuses_its_observation_keeps_its_last_state() -> None:
    class Reusing(Counter):
        buffer = np.zeros(3, np.float32)

        def _obs(self, last: float) -> np.ndarray:
            self.buffer[:] = super()._obs(last)
            return self.buffer

    fresh, reused = play([Counter((3, 2))]), play([Reusing((3, 2))])
    np.testing.assert_array_equal(reused.obs, fresh.obs)
    np.testing.assert_array_equal(reused.final_obs[:, 1], [3, 2, 2])
    np.testing.assert_array_equal(reused.final_obs, fresh.final_obs)


def test_without_a_cost_model_there_is_no_memory() -> None:
    r = play([Counter((3,)), Counter((4,))], policy=policy(), cost_model=NoCostModel())
    assert r.memory.shape == (8, 2, 0)
    assert r.final_memory.shape == (3, 0)
    assert not r.model_cost.any()
    assert not r.model_cost_var.any()


def test_no_episode_ends() -> None:
    r = play([Counter((9,))])
    assert (r.final_index.shape, r.final_obs.shape, r.final_memory.shape) == ((0, 2), (0, 3), (0, 2))
    assert r.episodes() == []


# -- the noise


def test_deterministic_plays_the_mean() -> None:
    r = play([Counter((3,))], deterministic=True)
    np.testing.assert_array_equal(r.actions, r.means)
    assert (play([Counter((3,))]).actions != r.actions).all()


def test_noise_is_gaussian_with_the_policy_s_deviation() -> None:
    p = policy(memory=2)
    r = play([Counter((50,)) for _ in range(4)], policy=p, steps=2500)
    noise = (r.actions - r.means).reshape(-1, ACTIONS)  # 10 000 draws each
    sigma = np.exp([-1.0, -0.5])
    np.testing.assert_allclose(noise.mean(0), 0, atol=4 * sigma.max() / 100)
    np.testing.assert_allclose(noise.std(0), sigma, rtol=4 / np.sqrt(2 * 10_000))
    assert np.corrcoef(noise.T)[0, 1] == pytest.approx(0, abs=0.04)
    # Within one standard deviation: erf(1 / sqrt 2) = 0.6827 of all draws.
    assert (np.abs(noise) < sigma).mean() == pytest.approx(0.6827, abs=0.02)


def draws(r) -> tuple[np.ndarray, np.ndarray]:
    """Noise (T, N, A) and first observations (N, D)."""
    return r.actions - r.means, r.obs[0]


def test_an_environment_draws_the_same_in_any_shard() -> None:
    """Alone, beside others and at another position, environment 5 lives the same 7 steps."""

    def shard(first: int, count: int):
        envs = [Counter((3, 2), terminating=(1,)) for _ in range(count)]
        return play(envs, first_env=first)

    whole = shard(0, 8)
    for first, count in ((5, 1), (4, 4), (2, 5), (5, 3)):
        part = shard(first, count)
        for name in ("obs", "memory", "actions", "means", "executed", "rewards", "model_cost"):
            np.testing.assert_allclose(
                getattr(part, name)[:, 5 - first],
                getattr(whole, name)[:, 5],
                rtol=0,
                atol=2e-6,  # BLAS may round a row of one matrix product as it likes
                err_msg=f"{name}, shard of {count} from {first}",
            )
        np.testing.assert_array_equal(part.obs[0], whole.obs[0, first : first + count])


def test_an_environment_draws_the_same_whatever_it_did_before() -> None:
    used = [Counter((3, 2)), Counter((4,))]
    play(used, iteration=0, steps=5)
    play(used, iteration=1, steps=11)
    again = play(used, iteration=2)
    fresh = play([Counter((3, 2)), Counter((4,))], iteration=2)
    for name in ("obs", "memory", "actions", "executed", "rewards", "final_obs", "final_memory"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fresh, name), err_msg=name)


def test_a_neighbour_s_behaviour_changes_nothing() -> None:
    calm = play([Counter((9,)), Counter((4,))])
    busy = play([Counter((1,), terminating=(0,)), Counter((4,))])
    for name in ("obs", "memory", "actions", "rewards", "model_cost"):
        np.testing.assert_allclose(getattr(calm, name)[:, 1], getattr(busy, name)[:, 1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"iteration": 1}, {"first_env": 2}, {"stream": EVALUATION_STREAM}]
)
def test_every_word_of_the_seed_matters(other: dict[str, int]) -> None:
    noise, first = draws(play([Counter((9,)), Counter((9,))]))
    noise_2, first_2 = draws(play([Counter((9,)), Counter((9,))], **other))
    assert (np.abs(noise[:, 0] - noise[:, 1]) > 1e-4).mean() > 0.9  # neighbours differ
    assert (np.abs(noise - noise_2) > 1e-4).mean() > 0.9
    assert (first[:, 0] != first_2[:, 0]).all()


def test_a_longer_rollout_begins_like_a_shorter_one() -> None:
    short, long = play([Counter((3,))], steps=4), play([Counter((3,))], steps=7)
    np.testing.assert_array_equal(short.actions, long.actions[:4])


# -- numbers that are none


def broken(env: Counter, what: str, at: int, value: float) -> Counter:
    """The environment with one number replaced in its `at`-th step (counted from 1)."""
    step = env.step

    def poisoned(action: np.ndarray):
        obs, reward, terminated, truncated, info = step(action)
        if len(env.given) == at:
            obs = np.where([False, True, False], value, obs) if what == "obs" else obs
            reward = value if what == "reward" else reward
            info = {"cost": value} if what == "cost" else info
        return obs, reward, terminated, truncated, info

    env.step = poisoned
    return env


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("what", "named"),
    [("reward", "rewards at step 3"), ("cost", "costs at step 3"), ("obs", "obs at step 4")],
)
def test_the_environment_s_first_bad_number_is_named(what: str, named: str, value: float) -> None:
    envs = [Counter((9,)), broken(Counter((9,)), what, at=4, value=value)]
    with pytest.raises(UserError) as caught:
        play(envs, first_env=6, iteration=12)
    message = str(caught.value)
    assert f"the environment returned a number that is not finite: {named} of environment 7" in message
    assert "iteration 12" in message
    assert str(value) in message


def test_a_bad_last_observation_is_named() -> None:
    with pytest.raises(UserError, match=r"the environment returned .*: final_obs at step 3 of environment 1"):
        play([Counter((9,)), broken(Counter((3,)), "obs", at=3, value=math.nan)])


def test_a_bad_first_observation_is_named() -> None:
    class Bad(Counter):
        def reset(self, **kwargs: Any):
            return super().reset(**kwargs)[0] * np.nan, {}

    with pytest.raises(UserError, match=r"the environment returned .*: obs at step 0 of environment 0"):
        play([Bad((9,))])


@pytest.mark.parametrize("what", ["weights", "log_std"])
def test_a_bad_policy_is_named(what: str) -> None:
    p = policy(memory=2)
    (p.layers[0][0] if what == "weights" else p.log_std)[...] = np.nan
    with pytest.raises(UserError, match=r"the policy returned .*: actions at step 0 of environment 0"):
        play([Counter((9,))], policy=p)


class BrokenTally(Tally):
    """Answers NaN in one of its three results, in the third step of an episode, environment 1 only."""

    def __init__(self, result: int):
        super().__init__()
        self.result = result

    def step(self, obs: np.ndarray, action: np.ndarray, h: np.ndarray):
        results = [np.array(x) for x in super().step(obs, action, h)]
        if len(h) > 1 and h[1, 0] == 2:
            results[self.result][1] = np.nan
        return tuple(results)


@pytest.mark.parametrize(
    ("result", "named"),
    [(0, "model_cost at step 2"), (1, "model_cost_var at step 2"), (2, "memory at step 3")],
)
def test_a_bad_cost_model_is_named(result: int, named: str) -> None:
    with pytest.raises(UserError, match=f"the cost model returned .*: {named} of environment 1"):
        play([Counter((9,)), Counter((9,))], cost_model=BrokenTally(result))


def test_a_bad_last_memory_is_named() -> None:
    """The reset hides the memory from the next step, but the cost critic is to read it at the time-out."""
    with pytest.raises(
        UserError, match=r"the cost model returned .*: final_memory at step 3 of environment 1"
    ):
        play([Counter((9,)), Counter((3,))], cost_model=BrokenTally(2))
