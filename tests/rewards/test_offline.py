"""Offline trajectories against the run that wants to learn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.errors import UserError
from rewards.labels import ThresholdOracle
from rewards.offline import check_offline, load_offline
from rollouts.recorded import LabeledTrajectory, Recording, write_recording
from tests.rollouts.test_recorded import dsrl


def trajectory(length: int, safe: bool, terminated: bool = False) -> LabeledTrajectory:
    return LabeledTrajectory(
        obs=np.zeros((length, 3), np.float32),
        actions=np.zeros((length, 2), np.float32),
        rewards=np.zeros(length, np.float32),
        terminated=terminated,
        ends=np.array([length]),
        labels=np.array([float(safe)], np.float32),
    )


def refused(*trajectories: LabeledTrajectory, **changes: Any) -> str:
    sizes = {"obs_dim": 3, "action_dim": 2, "horizon": 50, "slice_steps": 10, **changes}
    with pytest.raises(UserError) as caught:
        check_offline(trajectories, path="old.safetensors", **sizes)
    return str(caught.value)


def test_sound_trajectories_are_accepted() -> None:
    kept = [trajectory(50, True), trajectory(10, False), trajectory(4, False, terminated=True)]
    check_offline(kept, path="a", obs_dim=3, action_dim=2, horizon=50, slice_steps=10)


@pytest.mark.parametrize(("safe", "word"), [(True, "safe"), (False, "unsafe")])
def test_labels_of_one_class(safe: bool, word: str) -> None:
    message = refused(trajectory(50, safe), trajectory(50, safe))
    assert f"the offline labels are of one class: all 2 trajectories are {word}" in message
    assert "old.safetensors" in message
    assert "append=true" in message


def test_another_environment() -> None:
    for changes in ({"obs_dim": 17}, {"action_dim": 6}):
        message = refused(trajectory(50, True), trajectory(50, False), **changes)
        assert "the offline trajectories are of another environment" in message
        assert "observations of 3, actions of 2 numbers" in message
        wanted = {"obs_dim": 3, "action_dim": 2, **changes}
        assert f"observations of {wanted['obs_dim']}, actions of {wanted['action_dim']}, as in" in message


def test_an_episode_shorter_than_the_slice() -> None:
    message = refused(trajectory(50, True), trajectory(9, False))
    assert "offline trajectory 1 is shorter than the prefix slice" in message
    assert "9 steps, algo.slice_steps=10" in message
    assert "set algo.slice_steps=9 or less" in message


def test_an_episode_longer_than_the_horizon() -> None:
    message = refused(trajectory(50, True), trajectory(60, False))
    assert "offline trajectory 1 is longer than an episode of this run" in message
    assert "set env.horizon=60" in message


def test_dsrl_is_labelled_by_the_oracle(tmp_path: Path) -> None:
    path = dsrl(tmp_path / "a.hdf5")  # costs 0 1 1, then 0 2 and a fall
    rng = np.random.default_rng(0)
    first, second = load_offline(path, 1, ThresholdOracle(1.0), rng)
    np.testing.assert_array_equal(first.ends, [1, 2, 3])
    np.testing.assert_array_equal(first.labels, [1, 1, 0])
    np.testing.assert_array_equal(second.labels, [1, 0])
    # With a budget of 2 only the fall makes the second one unsafe.
    first, second = load_offline(path, 2, ThresholdOracle(2.0), rng)
    np.testing.assert_array_equal(first.labels, [1, 1])
    np.testing.assert_array_equal(second.labels, [0])


def test_our_own_labels_are_left_alone(tmp_path: Path) -> None:
    kept = [trajectory(20, True), trajectory(20, False)]
    write_recording(tmp_path / "a", Recording(env_id="x", trajectories=kept))
    found = load_offline(tmp_path / "a", 1, ThresholdOracle(0.0), np.random.default_rng(0))
    assert [t.labels.tolist() for t in found] == [[1.0], [0.0]]
    with pytest.raises(UserError, match="no such file of offline trajectories"):
        load_offline(tmp_path / "b", 1, ThresholdOracle(0.0), np.random.default_rng(0))
