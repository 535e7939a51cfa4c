"""Episodes, their sums and the joining of shards, on small rollouts written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollouts.trajectories import EnvSpec, Episode, Rollout, concatenate


def rollout(done: list[list[str]], offset: float = 0.0, version: tuple[int, int] = (0, 3)) -> Rollout:
    """`done` holds per step and environment: "." goes on, "T" terminated, "L" time limit."""
    flags = np.array(done)
    steps, envs = flags.shape
    terminated, truncated = flags == "T", flags == "L"
    ends = np.argwhere(terminated | truncated)
    values = offset + np.arange(steps * envs, dtype=np.float32).reshape(steps, envs)
    return Rollout(
        obs=np.stack([np.tile(offset + np.arange(envs), (steps + 1, 1))] * 3, -1),
        memory=np.zeros((steps + 1, envs, 2)) + offset,
        actions=values[..., None],
        means=values[..., None] + 1,
        executed=values[..., None] + 2,
        rewards=values,
        costs=values + 3,
        terminated=terminated,
        truncated=truncated,
        model_cost=values + 4,
        model_cost_var=values + 5,
        final_index=ends,
        final_obs=np.stack([offset + 100.0 * ends[:, 1] + ends[:, 0]] * 3, -1),
        final_memory=np.stack([offset + ends[:, 0]] * 2, -1),
        version=version,
    )


def test_episodes_are_the_whole_ones_by_environment() -> None:
    #   env:    0    1    2    3
    steps = [
        [".", "T", ".", "L"],
        ["L", ".", ".", "T"],
        [".", ".", ".", "."],
        ["T", ".", ".", "."],
        [".", "L", ".", "T"],
    ]
    assert rollout(steps).episodes() == [
        Episode(0, 0, 2, False),
        Episode(0, 2, 4, True),  # step 4 of environment 0 is cut by the rollout's end
        Episode(1, 0, 1, True),
        Episode(1, 1, 5, False),
        Episode(3, 0, 1, False),
        Episode(3, 1, 2, True),
        Episode(3, 2, 5, True),
    ]
    assert [len(e) for e in rollout(steps).episodes()] == [2, 2, 1, 4, 1, 1, 3]


def test_an_episode_ended_both_ways_counts_once_and_as_terminated() -> None:
    both = rollout([["."], ["T"]])
    both.truncated[1, 0] = True
    assert both.episodes() == [Episode(0, 0, 2, True)]


def test_shape_is_steps_and_environments() -> None:
    assert rollout([["."] * 3] * 2).shape == (2, 3)


def test_episode_sums() -> None:
    # rewards: [[0, 1], [2, 3], [4, 5], [6, 7]]
    r = rollout([[".", "."], ["L", "."], [".", "T"], ["T", "."]])
    sums = r.episode_sums(r.rewards, r.episodes())
    np.testing.assert_array_equal(sums, [0 + 2, 4 + 6, 1 + 3 + 5])
    np.testing.assert_array_equal(r.episode_sums(r.costs, r.episodes()), [2 + 6, 10 + 6, 9 + 9])


def test_episode_sums_are_taken_in_double_precision() -> None:
    r = rollout([["."]] * 9_999 + [["L"]])
    tenths = np.full(r.shape, 0.1, np.float32)
    # 10 000 times the float32 nearest to 0.1, which is 0.100000001490116...
    assert r.episode_sums(tenths, r.episodes())[0] == pytest.approx(1000.0000149011612, abs=1e-9)


def test_sums_of_no_episode_and_of_hidden_values() -> None:
    r = rollout([["."], ["."]])
    assert r.episode_sums(r.rewards, r.episodes()).shape == (0,)
    with pytest.raises(ValueError, match="hidden"):
        r.episode_sums(None, [])


def test_concatenate_puts_environments_side_by_side() -> None:
    left = rollout([[".", "L"], ["T", "."]])
    right = rollout([["."], ["T"]], offset=1000.0)
    empty = rollout([["."], ["."]], offset=2000.0)  # no episode ends here
    joined = concatenate([left, empty, right])
    assert joined.shape == (2, 4)
    assert joined.version == (0, 3)
    # Each environment's own numbers stay together, under its new index.
    np.testing.assert_array_equal(joined.rewards, [[0, 1, 2000, 1000], [2, 3, 2001, 1001]])
    for name in ("obs", "memory", "actions", "means", "executed", "costs", "model_cost", "model_cost_var"):
        value = getattr(joined, name)
        for shard, columns in ((left, slice(0, 2)), (empty, slice(2, 3)), (right, slice(3, 4))):
            np.testing.assert_array_equal(value[:, columns], getattr(shard, name), err_msg=name)
    np.testing.assert_array_equal(joined.final_index, [[0, 1], [1, 0], [1, 3]])
    np.testing.assert_array_equal(joined.final_obs[:, 0], [100, 1, 1001])
    np.testing.assert_array_equal(joined.final_memory[:, 0], [0, 1, 1001])
    assert joined.episodes() == [Episode(0, 0, 2, True), Episode(1, 0, 1, False), Episode(3, 0, 2, True)]
    np.testing.assert_array_equal(left.final_index, [[0, 1], [1, 0]])  # the shards are left as they were


@pytest.mark.parametrize("other", [(0, 4), (1, 3)])
def test_weights_of_two_versions_are_not_mixed(other: tuple[int, int]) -> None:
    shards = [rollout([["."]]), rollout([["."]], version=other)]
    with pytest.raises(ValueError, match="versions") as caught:
        concatenate(shards)
    assert str(sorted([(0, 3), other])) in str(caught.value)


def test_shards_of_different_lengths_are_not_joined() -> None:
    with pytest.raises(ValueError, match="dimension"):
        concatenate([rollout([["."]]), rollout([["."], ["."]])])


def test_action_dim_is_the_length_of_the_limits() -> None:
    sizes: dict[str, Any] = {"action_low": -np.ones(6), "action_high": np.ones(6)}
    assert EnvSpec(obs_dim=17, horizon=250, **sizes).action_dim == 6
