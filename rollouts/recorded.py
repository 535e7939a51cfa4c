"""Labelled trajectories on disk: a file of our own, and the reader of DSRL's HDF5 layout. No learning code.

Our file is one safetensors file: every trajectory's steps end to end, and a JSON header with the environment
and a hash. It holds no cost and no budget: what is learned from it is learned from the labels. DSRL's files
(https://github.com/liuzuxin/DSRL) hold true costs, which whoever labels them needs; they are read with h5py.
Nothing in here is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError

FORMAT, VERSION = "seedbed-labelled-trajectories", 1
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_BYTES = 4 * 2**30  # of a file, before any of it is read
DSRL_ARRAYS = ("observations", "actions", "rewards", "costs", "terminals", "timeouts")


@dataclass(frozen=True, kw_only=True)
class LabeledTrajectory:
    """One episode and what an annotator said about it."""

    obs: np.ndarray  # (L, S) float32: before each step, raw
    actions: np.ndarray  # (L, A) float32: as executed, in env units
    rewards: np.ndarray  # (L,) float32
    terminated: bool  # the environment ended it; False: the time limit did
    ends: np.ndarray  # (K,) int64: steps after which a prefix was judged, the last one L
    labels: np.ndarray  # (K,) float32: 1 safe, 0 unsafe


@dataclass(frozen=True, kw_only=True)
class CostedTrajectory:
    """One episode with its true costs, for an oracle to label."""

    obs: np.ndarray  # (L, S) float32
    actions: np.ndarray  # (L, A) float32
    rewards: np.ndarray  # (L,) float32
    costs: np.ndarray  # (L,) float32
    terminated: bool


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a file of ours holds."""

    env_id: str
    trajectories: list[LabeledTrajectory]


def is_hdf5(path: str | Path) -> bool:
    """Whether the file starts as HDF5 files do."""
    with open(path, "rb") as file:
        return file.read(len(HDF5_MAGIC)) == HDF5_MAGIC


def write_recording(path: str | Path, recording: Recording) -> None:
    """Write a recording, aside first, then renamed. Raises UserError for what `read_recording` refuses."""
    from safetensors.numpy import save_file

    path = Path(path)
    check_trajectories(recording.trajectories, str(path))
    arrays = _flatten(recording.trajectories)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "env_id": recording.env_id,
        "sha256": _digest(recording.env_id, arrays),
    }
    aside = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        save_file(arrays, aside, metadata={"seedbed": json.dumps(header)})
        aside.replace(path)
    except OSError as error:
        raise UserError(f"the recording cannot be written: {error.strerror}", given=str(path)) from error
    finally:
        aside.unlink(missing_ok=True)


def read_recording(path: str | Path) -> Recording:
    """The recording in a file of ours, every byte and every number checked. Raises UserError."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    _check_size(path)
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("seedbed", "null"))
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise _bad(path, "is not a recording of seedbed's", fix="write one with launch/record.py")
            if header.get("version") != VERSION:
                raise _bad(path, f"has format version {header.get('version')}, this seedbed reads {VERSION}")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise _bad(path, f"is truncated, damaged or of another program: {error}") from error
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    wanted = {f.name for f in fields(LabeledTrajectory)} | {"lengths", "counts"}
    if set(arrays) != wanted or not isinstance(header.get("env_id"), str):
        raise _bad(path, f"lacks arrays or has others: {sorted(set(arrays) ^ wanted)}")
    if _digest(header["env_id"], arrays) != header.get("sha256"):
        raise _bad(path, "is damaged: its content is not what its header was written for")
    return Recording(env_id=header["env_id"], trajectories=_unflatten(arrays, path))


def check_trajectories(trajectories: Sequence[LabeledTrajectory], where: str) -> None:
    """Raise UserError for numbers, labels and prefix ends that no estimator may be fitted to."""
    if not trajectories:
        raise UserError("a recording without trajectories", given=where)
    first = trajectories[0]
    for number, t in enumerate(trajectories):
        name, length = f"trajectory {number} of {where}", len(t.obs)
        for array, values in (("obs", t.obs), ("actions", t.actions), ("rewards", t.rewards)):
            _check_finite(values, array, name)
        if t.obs.shape[1:] != first.obs.shape[1:] or t.actions.shape[1:] != first.actions.shape[1:]:
            raise UserError(
                f"{name} has other sizes than the first", given=f"{t.obs.shape}, {t.actions.shape}"
            )
        if not (t.obs.ndim == t.actions.ndim == 2 and length == len(t.actions) == len(t.rewards) > 0):
            raise UserError(
                f"{name} has arrays that do not fit together",
                given=f"obs {t.obs.shape}, actions {t.actions.shape}, rewards {t.rewards.shape}",
                allowed="obs (L, S), actions (L, A), rewards (L,) with L >= 1",
            )
        rising = len(t.ends) > 0 and (np.diff(t.ends) > 0).all() and t.ends[0] >= 1 and t.ends[-1] == length
        if not rising:
            raise UserError(
                f"{name} has prefix ends out of range",
                given=str(np.asarray(t.ends).tolist()),
                allowed=f"rising steps from 1 to {length}, the last one {length} for the whole",
            )
        if t.labels.shape != t.ends.shape or not np.isin(t.labels, (0.0, 1.0)).all():
            raise UserError(
                f"{name} has labels that are neither 0 nor 1, or not one a prefix",
                given=str(np.asarray(t.labels).tolist()),
                allowed=f"{len(t.ends)} labels: 1 safe, 0 unsafe",
            )


def read_dsrl(path: str | Path) -> list[CostedTrajectory]:
    """Whole episodes of a DSRL file: flat arrays over all steps, episodes ended by `terminals` or `timeouts`.

    Steps after the last end are no whole episode and left out. Observations are those before each step, as in
    D4RL. Raises UserError for a file that lacks an array, is damaged or holds NaN, and without h5py.
    """
    try:
        import h5py
    except ImportError as error:
        raise UserError(
            "reading HDF5 needs h5py, which is not installed",
            given=str(path),
            fix="pip install '.[offline]', or h5py",
        ) from error
    path = Path(path)
    _check_size(path)
    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in DSRL_ARRAYS if not isinstance(file.get(name), h5py.Dataset)]
            if missing:
                raise _bad(
                    path, f"lacks {', '.join(missing)}", allowed=f"DSRL's arrays: {', '.join(DSRL_ARRAYS)}"
                )
            size = sum(
                int(file[name].nbytes) for name in DSRL_ARRAYS
            )  # unpacked, a compressed file is larger
            if size > MAX_BYTES:
                raise _too_large(path, size)
            arrays = {name: np.asarray(file[name][:]) for name in DSRL_ARRAYS}
    except (OSError, RuntimeError, TypeError) as error:  # h5py's own errors are of these kinds
        raise _bad(path, f"is truncated, damaged or of another program: {error}") from error
    steps = len(arrays["observations"])
    shapes = {name: a.shape for name, a in arrays.items()}
    flat = all(arrays[name].ndim == (2 if name in ("observations", "actions") else 1) for name in DSRL_ARRAYS)
    if not flat or {len(a) for a in arrays.values()} != {steps}:
        raise _bad(path, f"has arrays that do not fit together: {shapes}", allowed="one row or number a step")
    for name in ("observations", "actions", "rewards", "costs"):
        _check_finite(arrays[name], name, f"the file {path}")
    ends = np.flatnonzero(arrays["terminals"].astype(bool) | arrays["timeouts"].astype(bool)) + 1
    if not len(ends):
        raise _bad(path, "holds no whole episode: neither terminals nor timeouts")
    found, start = [], 0
    for end in ends:
        part = {name: arrays[name][start:end].astype(np.float32) for name in DSRL_ARRAYS[:4]}
        found.append(
            CostedTrajectory(
                obs=part["observations"],
                actions=part["actions"],
                rewards=part["rewards"],
                costs=part["costs"],
                terminated=bool(arrays["terminals"][end - 1]),
            )
        )
        start = int(end)
    return found


# --- inside


def _flatten(trajectories: Iterable[LabeledTrajectory]) -> dict[str, np.ndarray]:
    """Steps and labels of all trajectories end to end, with the number of each."""
    kept = list(trajectories)
    return {
        "obs": np.concatenate([t.obs for t in kept]).astype(np.float32),
        "actions": np.concatenate([t.actions for t in kept]).astype(np.float32),
        "rewards": np.concatenate([t.rewards for t in kept]).astype(np.float32),
        "terminated": np.array([t.terminated for t in kept], bool),
        "ends": np.concatenate([t.ends for t in kept]).astype(np.int64),
        "labels": np.concatenate([t.labels for t in kept]).astype(np.float32),
        "lengths": np.array([len(t.obs) for t in kept], np.int64),
        "counts": np.array([len(t.ends) for t in kept], np.int64),
    }


def _unflatten(arrays: dict[str, np.ndarray], path: Path) -> list[LabeledTrajectory]:
    lengths, counts, n = arrays["lengths"], arrays["counts"], len(arrays["terminated"])
    whole = {"obs": lengths, "actions": lengths, "rewards": lengths, "ends": counts, "labels": counts}
    for name, sizes in whole.items():
        fits = sizes.shape == (n,) and n > 0 and (sizes > 0).all() and sizes.sum() == len(arrays[name])
        if not fits:
            raise _bad(path, f"is damaged: {name} has {len(arrays[name])} rows, its lengths say otherwise")
    parts = {name: np.split(arrays[name], np.cumsum(sizes)[:-1]) for name, sizes in whole.items()}
    found = [
        LabeledTrajectory(
            **{name: parts[name][i] for name in whole}, terminated=bool(arrays["terminated"][i])
        )
        for i in range(n)
    ]
    check_trajectories(found, str(path))
    return found


def _digest(env_id: str, arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 over the environment's id and every array's name, shape, type and bytes."""
    digest = hashlib.sha256(env_id.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _check_finite(values: np.ndarray, array: str, name: str) -> None:
    if not np.isfinite(values).all():
        at = np.argwhere(~np.isfinite(values))[0]
        raise UserError(
            f"{name} holds a number that is not finite: {array} at step {int(at[0])}",
            given=str(values[tuple(at)]),
            allowed="finite numbers",
        )


def _check_size(path: Path) -> None:
    if not path.is_file():
        raise UserError("there is no such file of trajectories", given=str(path))
    if path.stat().st_size > MAX_BYTES:
        raise _too_large(path, path.stat().st_size)


def _too_large(path: Path, size: int) -> UserError:
    return _bad(path, f"is too large: {size:,} bytes", allowed=f"at most {MAX_BYTES:,}")


def _bad(path: Path, what: str, **more: Any) -> UserError:
    return UserError(f"the file {path} {what}", **more)
