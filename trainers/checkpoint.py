"""Checkpoints: trees of arrays and plain values on disk. Knows nothing of runs, learners or Ray; no pickle.

A checkpoint is a folder `step-000000120` with `arrays.safetensors`, `state.json` (all that is not an array)
and `manifest.json` (format, version, step, and the size and SHA-256 of the other two). It is written aside,
synced and renamed: a folder of that name is whole unless the disk damaged it, and the manifest tells.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError

Tree = dict[str, Any]

FORMAT, VERSION = "seedbed-checkpoint", 1
ARRAYS, STATE, MANIFEST = "arrays.safetensors", "state.json", "manifest.json"
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
}  # fmt: skip
NAMES = {tag: name for name, tag in DTYPES.items()}
FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A checkpoint that a newer one of the same step is about to replace; read if a kill left it as the only one.
FOLDER = re.compile(r"step-(\d{9,})(\.old)?")


class CheckpointError(UserError):
    """A checkpoint that cannot be used: says which file is broken and how."""


def write_error(error: OSError, what: str, path: Path, fix: str) -> UserError:
    """The user's side of a failed write: a full disk is told apart from a missing permission."""
    reason = "the disk is full" if error.errno in FULL_DISK else error.strerror or str(error)
    return UserError(f"Cannot write {what}: {reason}.", given=str(path), fix=fix)


def save_checkpoint(root: Path, step: int, tree: Tree, keep: int) -> Path:
    """Write `tree` as checkpoint `step` under `root`, then remove all but the newest `keep`.

    Leaves are NumPy arrays, torch tensors, int (any size), float, str, bool or None, in dicts with string
    keys and in lists. NumPy scalars become 0-d arrays. Raises TypeError for anything that would not come back
    as it was, and UserError when the disk refuses; the checkpoints before it stay whole in either case.
    """
    if keep < 1:
        raise UserError("run.keep_checkpoints must keep at least one checkpoint.", given=keep, allowed=">= 1")
    root = Path(root)
    arrays: dict[str, tuple[str, np.ndarray]] = {}
    values = _split(tree, "", arrays)
    folder, aside = root / f"step-{step:09d}", root / f".tmp-step-{step:09d}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".tmp-*"):  # of a writer that was killed
            shutil.rmtree(left)
        aside.mkdir()
        files = {ARRAYS: _write_arrays(aside / ARRAYS, arrays), STATE: _write_json(aside / STATE, values)}
        _write_json(aside / MANIFEST, {"format": FORMAT, "version": VERSION, "step": step, "files": files})
        _sync(aside)
        if folder.exists():
            old = folder.with_name(folder.name + ".old")
            _remove(old)
            folder.rename(old)
        aside.rename(folder)
        _sync(root)
        for other in _folders(root, upto=step)[keep:]:
            _remove(other)
        _remove(folder.with_name(folder.name + ".old"))
    except OSError as error:
        older = [f for f in _folders(root) if f != folder]
        last = f"the newest whole one is {older[0].name}" if older else "there is none before it"
        fix = f"make room or restore access there, then resume the run ({last})"
        raise write_error(error, f"the checkpoint of step {step}", folder, fix) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def load_checkpoint(path: Path) -> tuple[int, Tree]:
    """(step, tree) of one checkpoint folder, after checking every byte against the manifest.

    Arrays come back as writable NumPy arrays of the dtype and shape they had; bfloat16, which NumPy lacks, as
    torch tensors. Raises CheckpointError naming the broken file and what is wrong with it.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    data = {name: _read_whole(path / name, about) for name, about in manifest["files"].items()}
    try:
        tree = json.loads(data[STATE])
        for pointer, tensor in _read_arrays(data[ARRAYS]):
            _put(tree, pointer, tensor)
        return manifest["step"], tree
    except Exception as error:
        raise CheckpointError(
            f"Checkpoint {path} is whole but its content is not ours: {error!r}."
        ) from error


def latest_checkpoint(root: Path, warn: Callable[[str], None]) -> tuple[int, Tree] | None:
    """The newest whole checkpoint under `root`, or None if there is none at all.

    A broken one is named through `warn` and the one before it is used; all broken raises CheckpointError.
    """
    broken: list[str] = []
    for folder in _folders(Path(root)):
        try:
            found = load_checkpoint(folder)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        for message in broken:
            warn(f"{message}\nUsing {folder.name}, the one before it.")
        return found
    if broken:
        raise CheckpointError(
            "No whole checkpoint is left:\n" + "\n".join(broken),
            fix="start a new run, or put a whole checkpoint back under its name",
        )
    return None


def set_aside_after(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints past `step` to `unused-...`: a run that resumes at `step` must not load them."""
    moved = []
    for folder in _folders(Path(root)):
        if _order(folder)[0] > step:
            target = folder.with_name(f"unused-{folder.name}")
            _remove(target)
            moved.append(folder.rename(target))
    return moved


# --- trees


def _split(node: Any, pointer: str, arrays: dict[str, tuple[str, np.ndarray]]) -> Any:
    """The tree with None where arrays were; those go to `arrays` under their JSON pointer (RFC 6901)."""
    if type(node) is dict:
        if not all(type(key) is str for key in node):
            raise TypeError(f"checkpoint tree {pointer or '/'}: keys must be strings, got {list(node)}")
        return {
            key: _split(value, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}", arrays)
            for key, value in node.items()
        }
    if type(node) is list:
        return [_split(value, f"{pointer}/{i}", arrays) for i, value in enumerate(node)]
    if type(node) in (int, float, str, bool, type(None)):
        return node
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(node, torch.Tensor):
        dtype, node = str(node.dtype).removeprefix("torch."), node.detach().cpu().contiguous()
        array = (node.view(torch.int16) if dtype == "bfloat16" else node).numpy()
    elif isinstance(node, np.ndarray | np.generic):
        dtype, array = node.dtype.name, np.asarray(node, order="C")
    else:
        raise TypeError(f"checkpoint tree {pointer}: {type(node).__name__} would not come back as it was")
    if dtype not in DTYPES:
        raise TypeError(f"checkpoint tree {pointer}: arrays of {dtype} cannot be stored")
    arrays[pointer] = DTYPES[dtype], array.astype(array.dtype.newbyteorder("<"), copy=False)
    return None


def _put(tree: Tree, pointer: str, value: Any) -> None:
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/")]
    node: Any = tree
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[int(last) if isinstance(node, list) else last] = value


# --- files


def _write_arrays(path: Path, arrays: dict[str, tuple[str, np.ndarray]]) -> dict[str, Any]:
    """A safetensors file, hashed on the way (the library's own writer would need a second copy in memory)."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1][1].itemsize)  # keeps every tensor aligned
    header, offset = {}, 0
    for name, (tag, array) in ordered:
        header[name] = {"dtype": tag, "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    views = (array.reshape(-1).view(np.uint8).data for _, (_, array) in ordered)
    return _write(path, [len(text).to_bytes(8, "little"), text, *views])


def _write_json(path: Path, value: Any) -> dict[str, Any]:
    return _write(path, [json.dumps(value).encode()])


def _write(path: Path, parts: list[Any]) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"Checkpoint {path} is not a folder.")
    if not file.is_file():
        raise CheckpointError(f"Checkpoint {path} has no {MANIFEST}: it is not one of ours, or damaged.")
    try:
        manifest = json.loads(file.read_bytes())
        format_, version = manifest["format"], manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged or foreign: {error!r}.") from error
    if format_ != FORMAT:
        raise CheckpointError(f"{file} is of another program.", given=format_, allowed=FORMAT)
    if version != VERSION:
        raise CheckpointError(
            f"{file} has a format version this seedbed does not read.",
            given=version, allowed=str(VERSION), fix="use the version of seedbed that wrote it",
        )  # fmt: skip
    try:
        named = FOLDER.fullmatch(path.name)
        ok = type(manifest["step"]) is int and (named is None or int(named[1]) == manifest["step"])
        ok = ok and set(manifest["files"]) == {ARRAYS, STATE}
        ok = ok and all({"sha256", "bytes"} == set(about) for about in manifest["files"].values())
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}.") from error
    if not ok:
        raise CheckpointError(f"{file} is damaged: its step or its list of files does not fit.")
    return manifest


def _read_whole(file: Path, about: dict[str, Any]) -> bytes:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    if len(data) != about["bytes"]:
        kind = "truncated" if len(data) < about["bytes"] else "too long"
        raise CheckpointError(f"{file} is {kind}: {len(data)} bytes, the manifest says {about['bytes']}.")
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in the manifest.")
    return data


def _read_arrays(data: bytes) -> list[tuple[str, Any]]:
    from safetensors import deserialize

    return [(name, _as_array(NAMES[view["dtype"]], view)) for name, view in deserialize(data)]


def _as_array(dtype: str, view: dict[str, Any]) -> Any:
    if dtype != "bfloat16":
        return np.frombuffer(view["data"], np.dtype(dtype).newbyteorder("<")).reshape(view["shape"])
    import torch

    return torch.from_numpy(np.frombuffer(view["data"], np.int16).reshape(view["shape"])).view(torch.bfloat16)


def _order(folder: Path) -> tuple[int, bool]:
    match = FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), match[2] is None


def _folders(root: Path, upto: int | None = None) -> list[Path]:
    """Checkpoint folders, newest first, those with a step past `upto` left out."""
    if not root.is_dir():
        return []
    found = [f for f in root.iterdir() if FOLDER.fullmatch(f.name)]
    return sorted((f for f in found if upto is None or _order(f)[0] <= upto), key=_order, reverse=True)


def _remove(folder: Path) -> None:
    """Remove a folder so that a kill halfway does not leave half a checkpoint under a valid name."""
    if folder.exists():
        gone = folder.with_name(f".tmp-gone-{folder.name}-{os.getpid()}")
        folder.rename(gone)
        shutil.rmtree(gone)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
