"""Labelled trajectories in files: what comes back is what was written, and what is not sound is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

from envs.errors import UserError
from rollouts import recorded
from rollouts.recorded import (
    LabeledTrajectory,
    Recording,
    is_hdf5,
    read_dsrl,
    read_recording,
    write_recording,
)


def trajectory(length: int = 7, seed: int = 0, **changes: Any) -> LabeledTrajectory:
    rng = np.random.default_rng(seed)
    given: dict[str, Any] = {
        "obs": rng.standard_normal((length, 3), np.float32),
        "actions": rng.standard_normal((length, 2), np.float32),
        "rewards": rng.standard_normal(length, np.float32),
        "terminated": seed % 2 == 1,
        "ends": np.array([3, length]),
        "labels": np.array([1.0, 0.0], np.float32),
        **changes,
    }
    return LabeledTrajectory(**given)


def written(path: Path, *trajectories: LabeledTrajectory) -> Path:
    kept = trajectories or (trajectory(7, 0), trajectory(4, 1), trajectory(9, 2))
    write_recording(path, Recording(env_id="Throttle-v0", trajectories=list(kept)))
    return path


def refused(path: Path, **changes: Any) -> str:
    """The message for a recording whose second trajectory is wrong in one way, when written and when read."""
    bad = dataclasses.replace(trajectory(), **changes)
    with pytest.raises(UserError) as at_write:
        written(path, trajectory(), bad)
    assert not path.exists()
    with pytest.MonkeyPatch.context() as patch:  # as another program might have written it
        patch.setattr(recorded, "check_trajectories", lambda *args: None)
        written(path, trajectory(), bad)
    with pytest.raises(UserError) as at_read:
        read_recording(path)
    assert str(at_read.value) == str(at_write.value)
    return str(at_read.value)


def test_what_comes_back_is_what_was_written(tmp_path: Path) -> None:
    kept = [trajectory(7, 0), trajectory(4, 1), trajectory(9, 2, ends=np.array([9]), labels=np.ones(1))]
    found = read_recording(written(tmp_path / "a", *kept))
    assert found.env_id == "Throttle-v0"
    assert len(found.trajectories) == 3
    for a, b in zip(kept, found.trajectories, strict=True):
        for field in dataclasses.fields(LabeledTrajectory):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))
    assert [t.terminated for t in found.trajectories] == [False, True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]  # nothing is left aside


def test_the_file_knows_no_cost_and_no_budget(tmp_path: Path) -> None:
    content = written(tmp_path / "a").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert json.loads(header["__metadata__"]["seedbed"]).keys() == {"format", "version", "env_id", "sha256"}
    assert not any(word in content[: 8 + size] for word in (b"cost", b"budget"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        read_recording(tmp_path / "a")


@pytest.mark.parametrize("kept", [0, 5, 100, -1, -40])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "a")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="is truncated, damaged or of another program") as caught:
        read_recording(path)
    assert str(path) in str(caught.value)


def test_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    path = written(tmp_path / "a")
    sound = path.read_bytes()
    for position in np.linspace(0, len(sound) - 1, 97).astype(int):
        broken = bytearray(sound)
        broken[position] ^= 0x11
        path.write_bytes(bytes(broken))
        with pytest.raises(UserError):
            read_recording(path)
    path.write_bytes(sound)
    read_recording(path)


def test_a_foreign_safetensors_file(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "model", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is not a recording of seedbed's"):
        read_recording(tmp_path / "model")


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "VERSION", 7)
    path = written(tmp_path / "a")
    monkeypatch.undo()
    with pytest.raises(UserError, match="has format version 7, this seedbed reads 1"):
        read_recording(path)


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path, sign = tmp_path / "a", tmp_path / "sprung"
    path.write_bytes(pickle.dumps(Trap(sign)))
    for read in (read_recording, read_dsrl):
        with pytest.raises(UserError, match="truncated, damaged or of another program"):
            read(path)
    assert not sign.exists()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a")
    monkeypatch.setattr(recorded, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(UserError, match="is too large") as caught:
        read_recording(path)
    assert f"at most {path.stat().st_size - 1:,}" in str(caught.value)


def test_nan_is_named_by_trajectory_and_step(tmp_path: Path) -> None:
    for name, width in (("obs", (7, 3)), ("actions", (7, 2)), ("rewards", (7,))):
        values = np.zeros(width, np.float32)
        values[4] = np.nan
        path = tmp_path / name
        message = refused(path, **{name: values})
        assert f"trajectory 1 of {path} holds a number that is not finite: {name} at step 4" in message
        assert "given:   'nan'" in message


@pytest.mark.parametrize("ends", [[0, 7], [3, 8], [3, 6], [5, 3], [3, 3], [-1, 7], [7, 3]])
def test_prefix_ends_out_of_range(tmp_path: Path, ends: list[int]) -> None:
    message = refused(tmp_path / "a", ends=np.array(ends))
    assert "trajectory 1 of" in message
    assert "has prefix ends out of range" in message
    assert str(ends) in message
    assert "rising steps from 1 to 7, the last one 7 for the whole" in message


@pytest.mark.parametrize("labels", [[1.0, 0.5], [2.0, 0.0], [-1.0, 1.0], [np.nan, 1.0]])
def test_labels_that_are_not_0_or_1(tmp_path: Path, labels: list[float]) -> None:
    message = refused(tmp_path / "a", labels=np.array(labels, np.float32))
    assert "has labels that are neither 0 nor 1" in message
    assert "2 labels: 1 safe, 0 unsafe" in message


def test_trajectories_of_two_environments(tmp_path: Path) -> None:
    for changes in ({"obs": np.zeros((7, 4), np.float32)}, {"actions": np.zeros((7, 1), np.float32)}):
        with pytest.raises(UserError, match=r"trajectory 1 of .* has other sizes than the first"):
            written(tmp_path / "a", trajectory(), trajectory(**changes))


def test_arrays_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has arrays that do not fit together"):
        written(tmp_path / "a", trajectory(rewards=np.zeros(6, np.float32)))
    with pytest.raises(UserError, match="a recording without trajectories"):
        write_recording(tmp_path / "a", Recording(env_id="x", trajectories=[]))


# --- DSRL's layout


def dsrl(path: Path, **changes: Any) -> Path:
    """Eight steps: an episode of 3 cut by time, one of 2 that fell, and 3 steps of one without an end."""
    arrays: dict[str, Any] = {
        "observations": np.arange(24, dtype=np.float64).reshape(8, 3),
        "actions": np.arange(16, dtype=np.float32).reshape(8, 2) / 10,
        "rewards": np.arange(8, dtype=np.float32),
        "costs": np.array([0, 1, 1, 0, 2, 0, 0, 1], np.float32),
        "terminals": np.array([0, 0, 0, 0, 1, 0, 0, 0], bool),
        "timeouts": np.array([0, 0, 1, 0, 0, 0, 0, 0], bool),
        "next_observations": np.zeros((8, 3)),
        **changes,
    }
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if values is not None:
                file.create_dataset(name, data=values, compression="gzip")
    return path


def test_dsrl_episodes_by_hand(tmp_path: Path) -> None:
    path = dsrl(tmp_path / "a.hdf5")
    assert is_hdf5(path)
    first, second = read_dsrl(path)
    np.testing.assert_array_equal(first.obs, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    np.testing.assert_allclose(first.actions, [[0, 0.1], [0.2, 0.3], [0.4, 0.5]])
    np.testing.assert_array_equal(first.costs, [0, 1, 1])
    assert (first.terminated, second.terminated) == (False, True)
    np.testing.assert_array_equal(second.rewards, [3, 4])
    np.testing.assert_array_equal(second.costs, [0, 2])
    assert first.obs.dtype == second.costs.dtype == np.float32


@pytest.mark.parametrize("name", ["observations", "costs", "timeouts"])
def test_dsrl_without_an_array(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"lacks {name}") as caught:
        read_dsrl(dsrl(tmp_path / "a.hdf5", **{name: None}))
    assert "observations, actions, rewards, costs, terminals, timeouts" in str(caught.value)


def test_dsrl_with_bad_numbers(tmp_path: Path) -> None:
    costs = np.zeros(8)
    costs[6] = np.inf
    with pytest.raises(UserError, match="not finite: costs at step 6"):
        read_dsrl(dsrl(tmp_path / "a.hdf5", costs=costs))
    with pytest.raises(UserError, match="arrays that do not fit together"):
        read_dsrl(dsrl(tmp_path / "b.hdf5", rewards=np.zeros(7)))
    with pytest.raises(UserError, match="arrays that do not fit together"):
        read_dsrl(dsrl(tmp_path / "c.hdf5", costs=np.zeros((8, 1))))
    nothing = np.zeros(8, bool)
    with pytest.raises(UserError, match="holds no whole episode"):
        read_dsrl(dsrl(tmp_path / "d.hdf5", terminals=nothing, timeouts=nothing))


def test_dsrl_truncated_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dsrl(tmp_path / "a.hdf5")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="is truncated, damaged or of another program"):
        read_dsrl(path)
    # Packed it is small; what it unpacks to is what counts.
    big = dsrl(tmp_path / "b.hdf5", next_observations=None, observations=np.zeros((8, 90_000)))
    monkeypatch.setattr(recorded, "MAX_BYTES", 5_000_000)
    assert big.stat().st_size < 1_000_000
    with pytest.raises(UserError, match="is too large"):
        read_dsrl(big)


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dsrl(tmp_path / "a.hdf5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match="needs h5py, which is not installed") as caught:
        read_dsrl(path)
    assert "pip install '.[offline]'" in str(caught.value)
