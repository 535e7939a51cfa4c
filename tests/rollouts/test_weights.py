"""Weights arrive as they were sent, whatever their dtype and shape, or an error says that they did not."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from rollouts.engine import check_fit
from rollouts.store import StoredWeights, send
from rollouts.weights import (
    ALIGN,
    PackedWeights,
    Transfer,
    WeightsError,
    accept,
    aligned,
    lora_delta,
    pack,
)

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.bool),
)


def some_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    named = {
        f"{dtype}": torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        if dtype in (torch.int64, torch.uint8, torch.bool)
        else torch.randn(3, 5, generator=generator).to(dtype)
        for dtype in DTYPES
    }
    return named | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "parameter": torch.nn.Parameter(torch.randn(7, generator=generator)),
        "large": torch.randn(64, 33, generator=generator),
    }


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    bytes_of = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bytes_of)


@pytest.mark.parametrize("views_from", [float("inf"), 1000, 0])
def test_every_dtype_and_shape_arrives_bit_for_bit(views_from: float) -> None:
    named = some_weights()
    packed = pickle.loads(pickle.dumps(pack(named, (1, 2), views_from=views_from)))
    packed.verify()
    arrived = packed.tensors()
    assert list(arrived) == list(named)
    for name, tensor in named.items():
        assert equal(arrived[name], tensor), name


def test_tensors_are_views_that_start_where_torch_would_put_them() -> None:
    packed = pack(some_weights(), (0, 1))
    (chunk,) = packed.chunks
    first, last = chunk.ctypes.data, chunk.ctypes.data + chunk.nbytes
    for tensor in packed.tensors().values():
        if tensor.numel():
            assert tensor.data_ptr() % ALIGN == 0
            assert first <= tensor.data_ptr() < last
    assert packed.nbytes == chunk.nbytes


def test_a_packed_version_is_a_snapshot() -> None:
    named = {"w": torch.ones(4)}
    packed = pack(named, (0, 1))
    named["w"].add_(1)
    assert packed.tensors()["w"].tolist() == [1.0] * 4


def test_the_sum_is_xxh3_over_all_bytes_in_order() -> None:
    named = {"a": torch.arange(5, dtype=torch.int32), "b": torch.ones(40)}
    packed = pack(named, (3, 4), "lora", {"scaling": {"m": 0.5}}, views_from=100)
    manifest = json.dumps([["a", "int32", [5], 0, 0], ["b", "float32", [40], 1, 0]])
    assert json.loads(packed.manifest) == json.loads(manifest)
    head = repr(((3, 4), "lora", [("scaling", {"m": 0.5})])).encode()
    a = np.arange(5, dtype=np.int32).tobytes() + b"\0" * (ALIGN - 20)
    by_hand = xxhash.xxh3_64_intdigest(head + packed.manifest + a + np.ones(40, np.float32).tobytes())
    assert packed.sum == by_hand


def test_lent_memory_is_used_and_its_old_bytes_are_not_sent() -> None:
    memory = aligned(1 << 14)
    memory[:] = 255
    named = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(5)}
    packed = pack(named, (0, 1), memory=lambda nbytes: memory)
    assert packed.chunks[0].ctypes.data == memory.ctypes.data
    assert not packed.chunks[0].any()
    assert packed.sum == pack(named, (0, 1)).sum


def test_one_flipped_bit_anywhere_is_noticed() -> None:
    named = {"w": torch.randn(50, 50), "v": torch.randn(1000)}
    clean = pack(named, (0, 1), views_from=9000)
    rng = np.random.default_rng(0)
    for chunk in range(len(clean.chunks)):
        size = clean.chunks[chunk].nbytes
        for at in (0, size - 1, *rng.integers(0, size, 50)):
            broken = copy.deepcopy(clean)
            broken.chunks[chunk][at] ^= 1 << rng.integers(8)
            with pytest.raises(WeightsError, match=r"weights \(0, 1\) arrived with another checksum"):
                broken.verify()


@pytest.mark.parametrize("change", ["swap words", "swap pages", "number", "manifest", "meta", "truncate"])
def test_other_damage_is_noticed(change: str) -> None:
    packed = pack({"w": torch.randn(4096)}, (0, 1), "lora", {"scaling": {"m": 1.0}})
    packed.verify()
    (chunk,) = packed.chunks
    words, pages = chunk.view(np.uint64), chunk.reshape(-1, 4096)
    if change == "swap words":
        words[[3, 4]] = words[[4, 3]]
    elif change == "swap pages":
        pages[[0, 1]] = pages[[1, 0]]
    elif change == "number":
        packed.version = (0, 2)
    elif change == "manifest":
        packed.manifest = packed.manifest.replace(b'"w"', b'"v"')
    elif change == "meta":
        packed.meta["scaling"]["m"] = 2.0
    else:
        packed.chunks = [chunk[:-ALIGN]]
    with pytest.raises(WeightsError, match="checksum"):
        packed.verify()


class Toy:
    """An engine of one tensor."""

    version = (0, 0)
    tensors: dict[str, torch.Tensor] = {}  # noqa: RUF012

    def load_weights(self, packed: PackedWeights) -> None:
        check_fit(packed.tensors(), {"w": torch.empty(2)})
        self.version, self.tensors = packed.version, packed.tensors()


def test_what_was_verified_becomes_active() -> None:
    engine, transfer = Toy(), Transfer((0, 1), "toy", 5)
    accept(pack({"w": torch.tensor([1.0, 2.0])}, (0, 1)), engine, transfer, threading.Lock())
    assert (transfer.state, engine.version) == ("active", (0, 1))
    assert engine.tensors["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("named", "flip", "message"),
    [
        ({"w": torch.ones(2)}, True, "checksum"),
        ({"x": torch.ones(2)}, False, "weights for 'x', which this model does not have"),
        ({"w": torch.ones(3)}, False, r"of shape \(3,\); this model's is of shape \(2,\)"),
        ({"w": torch.ones(1)}, False, r"of shape \(1,\)"),  # copying would have broadcast it
    ],
)
def test_what_cannot_be_active_leaves_the_engine_alone(named: Any, flip: bool, message: str) -> None:
    packed, engine, transfer, busy = pack(named, (0, 1)), Toy(), Transfer((0, 1), "toy", 5), threading.Lock()
    if flip:
        packed.chunks[0][0] ^= 1
    with pytest.raises(WeightsError, match=message):
        accept(packed, engine, transfer, busy)
    assert (transfer.state, engine.version) == ("failed", (0, 0))
    assert not busy.locked()


def test_an_engine_that_stays_busy_is_named() -> None:
    busy, transfer = threading.Lock(), Transfer((0, 1), "rollout worker 3", 0.05)
    busy.acquire()
    with pytest.raises(WeightsError, match=r"weights \(0, 1\): rollout worker 3 was busy for 0.05 s"):
        accept(pack({"w": torch.ones(2)}, (0, 1)), Toy(), transfer, busy)
    assert transfer.state == "failed"


def test_states_come_in_their_order_only() -> None:
    transfer = Transfer((0, 1), "w", 5)
    for wrong in ("announced", "verified", "active", "failed", "nonsense"):
        with pytest.raises(WeightsError, match=f"announced -> {wrong}"):
            transfer.advance(wrong)
    for state in ("received", "verified", "active"):
        transfer.advance(state)
    with pytest.raises(WeightsError, match="active -> received"):
        transfer.advance("received")
    failed = Transfer((0, 1), "w", 5)
    failed.fail("gone")
    with pytest.raises(WeightsError, match="failed -> received"):
        failed.advance("received")


def test_each_state_has_its_own_deadline() -> None:
    now = [0.0]
    transfer = Transfer((2, 7), "rollout worker 1", 10, clock=lambda: now[0])
    now[0] = 9
    transfer.advance("received")
    now[0] = 18
    transfer.advance("verified")
    now[0] = 29
    with pytest.raises(WeightsError, match=r"\(2, 7\): rollout worker 1 stayed 'verified' for 11 s"):
        transfer.advance("active")
    assert transfer.state == "failed"


def test_adapters_add_their_scaled_product() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [5.0]])
    delta = lora_delta({"m.q.lora_A": a, "m.q.lora_B": b}, {"m.q": 0.5})
    assert {k: v.tolist() for k, v in delta.items()} == {"m.q.weight": [[1.5, 3.0], [2.5, 5.0]]}


def test_through_the_object_store_and_back(ray: Any) -> None:
    named = some_weights() | {"huge": torch.randn(1200, 1000)}
    stored = send(named, (0, 5), "full", {"k": 1})
    named["huge"].zero_()  # a snapshot was taken
    named["scalar"].fill_(9)
    assert isinstance(stored, StoredWeights)
    assert len(pickle.dumps(StoredWeights((0, 5), 1, []))) < 300
    arrived = stored.fetch(30)
    arrived.verify()
    assert (arrived.version, arrived.meta, stored.nbytes) == ((0, 5), {"k": 1}, arrived.nbytes)
    assert len(arrived.chunks) == 2  # the huge one was not copied to the others
    fresh = some_weights()
    tensors = arrived.tensors()
    for name, tensor in fresh.items():
        assert equal(tensors[name], tensor), name
        assert not tensor.numel() or tensors[name].data_ptr() % ALIGN == 0
    assert tensors["huge"].any()
    again = send(some_weights(), (0, 6)).fetch(30)  # the scratch memory is used again
    again.verify()
    arrived.verify()


def test_without_ray_weights_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert isinstance(send({"w": torch.ones(2)}, (0, 1)), PackedWeights)
