"""Checkpoints: exact round trips, damage of every kind, killed writers, full disks."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from envs.errors import UserError
from trainers.checkpoint import (
    ARRAYS,
    MANIFEST,
    STATE,
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    set_aside_after,
)


def same(a, b) -> bool:
    """Equal in type, dtype, shape, bits, order of keys."""
    if isinstance(a, np.ndarray | np.generic):
        return (
            isinstance(b, np.ndarray)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return type(b) is list and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def folders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def a_tree(value: float) -> dict:
    return {"weights": np.full((4, 3), value), "step_size": value, "generator": {"state": 2**128 - 1}}


class TestRoundTrip:
    def test_every_kind_of_leaf(self, tmp_path):
        generator = np.random.default_rng(3)
        tree = {
            "float32": generator.normal(size=(3, 4)).astype(np.float32),
            "float64": generator.normal(size=7),
            "float16": np.array([1.5, -0.0], np.float16),
            "int64": np.array([[-(2**63), 2**63 - 1]]),
            "uint8": np.arange(5, dtype=np.uint8),
            "bool": np.array([True, False, True]),
            "zero_dim": np.array(2.5, np.float32),
            "zero_dim_bool": np.array(True),
            "empty": np.zeros((0, 4)),
            "not_finite": np.array([np.nan, np.inf, -np.inf, -0.0], np.float32),
            "strided": np.arange(24).reshape(4, 6)[::2, ::3],
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "pcg64": generator.bit_generator.state,
            "mt19937": np.random.RandomState(1).get_state(legacy=False),
            "scalars": [1, -0.5, 1e-300, 0.1 + 0.2, True, None, "text \u03bb \n", 10**40],
            "scalar_nan": [float("nan"), float("inf")],
            "nested": {"list": [{"a": np.ones(2)}, [np.zeros(1), []]], "nothing": {}},
        }
        step, back = load_checkpoint(save_checkpoint(tmp_path, 12, tree, keep=2))
        assert step == 12
        assert same(tree, back)

    def test_a_restored_generator_draws_the_same_numbers(self, tmp_path):
        generator = np.random.default_rng(5)
        _, tree = load_checkpoint(save_checkpoint(tmp_path, 1, {"rng": generator.bit_generator.state}, 1))
        other = np.random.default_rng(0)
        other.bit_generator.state = tree["rng"]
        assert np.array_equal(other.normal(size=100), generator.normal(size=100))

    def test_keys_with_dots_slashes_and_tildes(self, tmp_path):
        keys = ["a.b", "a/b", "a~b", "a~1b", "a~0", "", "/", "0", " ", "\u03bb", "__metadata__"]
        tree = {key: {inner: np.array([i, j]) for j, inner in enumerate(keys)} for i, key in enumerate(keys)}
        tree["plain"] = {key: key for key in keys}
        assert same(tree, load_checkpoint(save_checkpoint(tmp_path, 1, tree, 1))[1])

    def test_torch_tensors_come_back_bit_for_bit(self, tmp_path):
        torch = pytest.importorskip("torch")
        tree = {
            "float32": torch.randn(3, 2, requires_grad=True),
            "int64": torch.arange(4),
            "bool": torch.tensor([True, False]),
            "zero_dim": torch.tensor(3.25),
            "transposed": torch.randn(3, 2).t(),
            "bfloat16": torch.randn(5).bfloat16(),
            "bfloat16_zero_dim": torch.tensor(1.5).bfloat16(),
            "bfloat16_empty": torch.zeros(0, 2).bfloat16(),
        }
        _, back = load_checkpoint(save_checkpoint(tmp_path, 1, tree, 1))
        for name, tensor in tree.items():
            found = torch.as_tensor(back[name])
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found, tensor), name
        assert isinstance(back["float32"], np.ndarray)
        assert isinstance(back["bfloat16"], torch.Tensor)

    def test_arrays_are_an_ordinary_safetensors_file_and_can_be_written_to(self, tmp_path):
        from safetensors.numpy import load_file

        path = save_checkpoint(tmp_path, 1, {"b": np.array([True]), "net": {"w": np.eye(2)}}, 1)
        arrays = load_file(path / ARRAYS)
        assert arrays.keys() == {"/b", "/net/w"}
        assert np.array_equal(arrays["/net/w"], np.eye(2))
        back = load_checkpoint(path)[1]
        back["net"]["w"] += 1

    @pytest.mark.parametrize(
        "leaf",
        [(1, 2), {1, 2}, {1: 2}, np.array(["a"]), np.array([None]), object(), 1j, b"bytes"],
        ids=str,
    )
    def test_what_would_not_come_back_is_refused(self, tmp_path, leaf):
        with pytest.raises(TypeError, match="/deep/leaf"):
            save_checkpoint(tmp_path, 1, {"deep": {"leaf": leaf}}, 1)
        assert not any(tmp_path.iterdir())


class TestRetention:
    def test_keeps_the_newest(self, tmp_path):
        for step in (1, 2, 3, 10):
            save_checkpoint(tmp_path, step, a_tree(step), keep=2)
        assert folders(tmp_path) == ["step-000000003", "step-000000010"]
        assert latest_checkpoint(tmp_path, pytest.fail)[0] == 10

    def test_saving_a_step_again_replaces_it(self, tmp_path):
        save_checkpoint(tmp_path, 1, a_tree(1), keep=2)
        save_checkpoint(tmp_path, 1, a_tree(5), keep=2)
        assert folders(tmp_path) == ["step-000000001"]
        assert same(latest_checkpoint(tmp_path, pytest.fail)[1], a_tree(5))

    def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(self, tmp_path):
        path = save_checkpoint(tmp_path, 1, a_tree(1), keep=1)
        path.rename(tmp_path / "step-000000001.old")
        assert same(latest_checkpoint(tmp_path, pytest.fail)[1], a_tree(1))
        save_checkpoint(tmp_path, 1, a_tree(2), keep=1)
        assert folders(tmp_path) == ["step-000000001"]

    def test_what_a_resumed_run_left_behind_is_set_aside_and_never_read(self, tmp_path):
        for step in (1, 2, 3):
            save_checkpoint(tmp_path, step, a_tree(step), keep=3)
        assert [p.name for p in set_aside_after(tmp_path, 1)] == [
            "unused-step-000000003",
            "unused-step-000000002",
        ]
        assert latest_checkpoint(tmp_path, pytest.fail)[0] == 1
        save_checkpoint(tmp_path, 2, a_tree(2), keep=3)
        assert latest_checkpoint(tmp_path, pytest.fail)[0] == 2

    def test_nothing_there(self, tmp_path):
        assert latest_checkpoint(tmp_path, pytest.fail) is None
        assert latest_checkpoint(tmp_path / "missing", pytest.fail) is None

    def test_keep_zero_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="at least one"):
            save_checkpoint(tmp_path, 1, {}, keep=0)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def edit_manifest(path: Path, **changes) -> None:
    file = path / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGES = {
    "truncated": (
        lambda p: (p / ARRAYS).write_bytes((p / ARRAYS).read_bytes()[:-5]),
        "arrays.*truncated",
    ),
    "grown": (
        lambda p: (p / STATE).write_bytes((p / STATE).read_bytes() + b" "),
        "state.json is too long",
    ),
    "flipped": (lambda p: flip(p / ARRAYS, -1), "arrays.safetensors is damaged: its SHA-256"),
    "flipped state": (lambda p: flip(p / STATE, 3), "state.json is damaged: its SHA-256"),
    "emptied": (lambda p: (p / STATE).write_bytes(b""), "state.json is truncated"),
    "file gone": (lambda p: (p / ARRAYS).unlink(), "arrays.safetensors is missing"),
    "manifest gone": (lambda p: (p / MANIFEST).unlink(), "has no manifest.json"),
    "manifest torn": (lambda p: (p / MANIFEST).write_text('{"format": "se'), "manifest.json is damaged"),
    "foreign": (lambda p: edit_manifest(p, format="other"), "(?s)of another program.*other"),
    "future": (lambda p: edit_manifest(p, version=2), "(?s)format version.*use the version of seedbed"),
    "other step": (lambda p: edit_manifest(p, step=99), "its step or its list of files"),
    "file list": (lambda p: edit_manifest(p, files={}), "its step or its list of files"),
    "path outside": (
        lambda p: edit_manifest(p, files={"../x": {"sha256": "", "bytes": 0}}),
        "its step or its list of files",
    ),
    "foreign folder": (
        lambda p: (shutil.rmtree(p), p.mkdir(), (p / "model.pkl").write_bytes(b"\x80\x04.")),
        "has no manifest.json: it is not one of ours",
    ),
    "a file": (lambda p: (shutil.rmtree(p), p.write_text("x")), "is not a folder"),
}


class TestDamage:
    """Each kind is named by `load_checkpoint`, and `latest_checkpoint` uses the one before."""

    @pytest.mark.parametrize("kind", DAMAGES)
    def test_is_named_and_the_one_before_is_used(self, tmp_path, kind):
        save_checkpoint(tmp_path, 10, a_tree(1.0), keep=2)
        path = save_checkpoint(tmp_path, 20, a_tree(2.0), keep=2)
        damage, message = DAMAGES[kind]
        damage(path)
        with pytest.raises(CheckpointError, match=message) as error:
            load_checkpoint(path)
        assert str(path) in str(error.value)
        warnings: list[str] = []
        step, tree = latest_checkpoint(tmp_path, warnings.append)
        assert (step, tree["step_size"]) == (10, 1.0)
        assert len(warnings) == 1
        assert str(path) in warnings[0]
        assert "Using step-000000010" in warnings[0]

    def test_all_broken(self, tmp_path):
        for step in (1, 2):
            flip(save_checkpoint(tmp_path, step, a_tree(1), keep=2) / ARRAYS, -1)
        with pytest.raises(CheckpointError, match=r"(?s)No whole checkpoint.*step-000000002.*step-000000001"):
            latest_checkpoint(tmp_path, pytest.fail)

    def test_no_single_bit_goes_unnoticed(self, tmp_path):
        """Any flipped byte, in any file, is an error or (white space in the manifest) changes nothing."""
        tree = a_tree(1.0)
        path = save_checkpoint(tmp_path, 7, tree, keep=1)
        silent = 0
        for file in path.iterdir():
            whole = file.read_bytes()
            for at in range(len(whole)):
                flip(file, at)
                try:
                    step, back = load_checkpoint(path)
                except CheckpointError:
                    pass
                else:
                    assert step == 7
                    assert same(tree, back)
                    silent += 1
                file.write_bytes(whole)
        assert silent <= 20

    def test_pickle_is_never_opened(self):
        from trainers import checkpoint

        source = Path(checkpoint.__file__).read_text()
        assert "import pickle" not in source
        assert "torch.load" not in source
        assert "np.load" not in source


WRITER = """
import sys
import numpy as np
from pathlib import Path
from trainers.checkpoint import save_checkpoint
root, size = Path(sys.argv[1]), int(sys.argv[2])
for step in range(1, 1000):
    save_checkpoint(root, step, {"step": step, "filler": np.full(size, step, np.float64)}, keep=2)
    print(step, flush=True)
"""


class TestKilledWriter:
    def test_sigkill_while_writing(self, tmp_path):
        """Kill a real writer at random moments, several times over one root: what is left is always whole."""
        dice = random.Random(0)
        torn = 0
        for _ in range(6):
            child = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(tmp_path), "500000"], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            said = int(child.stdout.readline())
            deadline = time.monotonic() + 10
            while not any(tmp_path.glob(".tmp-step-*/" + ARRAYS)):  # it is writing now
                assert time.monotonic() < deadline
            time.sleep(dice.uniform(0, 0.01))
            child.send_signal(signal.SIGKILL)
            child.wait()
            said = int((child.stdout.read().split() or [said])[-1])
            child.stdout.close()
            torn += any(tmp_path.glob(".tmp-*"))
            step, tree = latest_checkpoint(tmp_path, pytest.fail)
            assert step in (said, said + 1)  # renamed but not yet announced
            assert tree["step"] == step
            assert np.array_equal(tree["filler"], np.full(500000, step, np.float64))
        assert torn > 0, "no kill hit a write: the test shows nothing"
        save_checkpoint(tmp_path, step + 1, {}, keep=2)
        assert not any(tmp_path.glob(".tmp-*")), "leftovers of killed writers are cleaned up"


LIMITED = """
import resource, sys
import numpy as np
from pathlib import Path
from trainers.checkpoint import save_checkpoint
root = Path(sys.argv[1])
save_checkpoint(root, 1, {"w": np.ones(10)}, keep=2)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(root, 2, {"w": np.ones(100_000)}, keep=2)
except Exception as error:
    print(type(error).__name__)
    print(error)
"""


def check_disk_message(message: str, root: Path) -> None:
    assert "Cannot write the checkpoint of step 2: the disk is full." in message
    assert str(root / "step-000000002") in message
    assert "make room" in message
    assert "step-000000001" in message
    assert folders(root) == ["step-000000001"], "the temporary folder is gone"
    assert latest_checkpoint(root, pytest.fail)[0] == 1


class TestFullDisk:
    def test_a_real_full_file_system(self, small_disk):
        root = small_disk / "checkpoints"
        save_checkpoint(root, 1, {"w": np.ones(10)}, keep=2)
        with pytest.raises(UserError) as error:
            save_checkpoint(root, 2, {"w": np.ones(500_000)}, keep=2)
        check_disk_message(str(error.value), root)
        save_checkpoint(root, 2, {"w": np.ones(100)}, keep=2)
        assert latest_checkpoint(root, pytest.fail)[0] == 2

    def test_a_process_that_may_not_write_more(self, tmp_path):
        ran = subprocess.run(
            [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
        )
        kind, message = ran.stdout.split("\n", 1)
        assert kind == "UserError"
        check_disk_message(message, tmp_path)

    def test_a_place_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(
            UserError, match=r"(?s)Cannot write the checkpoint of step 1: Not a directory.*file"
        ):
            save_checkpoint(tmp_path / "file" / "checkpoints", 1, {}, keep=1)
