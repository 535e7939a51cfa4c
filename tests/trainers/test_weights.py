"""What arrives is what was sent: one flipped bit anywhere, or two arrays changing places, is an error."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from algos.traces import Estimator, EstimatorConfig, SummaryCostModel
from rollouts.collect import NoCostModel
from tests.rollouts.toys import random_policy
from trainers.normalize import RunningMeanStd
from trainers.weights import Weights, checksum


def sealed(memory: bool = True) -> Weights:
    cost_model: Any = NoCostModel()
    if memory:
        torch.manual_seed(0)
        config = EstimatorConfig(hidden_size=4, layers=2, decoder_width=6)
        norm = RunningMeanStd(4)
        norm.update(np.random.default_rng(0).random((9, 4)))
        cost_model = SummaryCostModel(Estimator(5, config), norm, version=3, active=True, visible=True)
    policy = random_policy(3 + 4 * memory, 2, 3)
    return Weights(version=(1, 17), policy=policy, cost_model=cost_model).seal()


def arrays_of(weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    """Every array a runner acts with, named one by one."""
    p = weights.policy
    for i, (weight, bias) in enumerate(p.layers):
        yield f"policy weight {i}", weight
        yield f"policy bias {i}", bias
    for name in ("log_std", "obs_mean", "obs_std", "action_low", "action_high"):
        yield name, getattr(p, name)
    model = weights.cost_model
    if isinstance(model, SummaryCostModel):
        yield from model.arrays.items()
        yield "memory_mean", model.memory_mean
        yield "memory_std", model.memory_std


def test_checksum_of_known_bytes() -> None:
    one = np.array([1, 2, 3], np.uint8)
    assert checksum([one]) == zlib.crc32(b"((3,), '|u1')" + bytes([1, 2, 3]))
    assert checksum([]) == 0


def test_checksum_sees_shape_dtype_and_order() -> None:
    a, b = np.arange(6.0), np.ones(6)
    different = [
        [a, b],
        [b, a],
        [a.reshape(2, 3), b],
        [a.astype(np.float32), b],
        [a.view(np.int64), b],  # the same bytes
        [np.concatenate([a, b])],  # the same bytes
        [a, b, np.zeros(0)],
    ]
    assert len({checksum(arrays) for arrays in different}) == len(different)


def test_checksum_of_a_view_is_that_of_its_values() -> None:
    a = np.arange(12.0).reshape(3, 4)
    assert checksum([a.T]) == checksum([np.ascontiguousarray(a.T)])
    assert checksum([a[::2]]) == checksum([a[::2].copy()])


@pytest.mark.parametrize("memory", [True, False])
def test_a_copy_is_whole(memory: bool) -> None:
    copy.deepcopy(sealed(memory)).verify()  # raises when a byte is lost


def test_there_are_as_many_arrays_as_the_models_have() -> None:
    # 2 policy layers; 2 GRU layers of 4, 2 decoder layers, 2 heads, input scaling, memory scaling.
    assert len(list(arrays_of(sealed()))) == 2 * 2 + 5 + (2 * 4 + 2 * 2 + 2 * 2 + 2) + 2


NAMES = [name for name, _ in arrays_of(sealed())]


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_is_seen(name: str) -> None:
    weights = sealed()
    array = dict(arrays_of(weights))[name]
    bytes_ = array.reshape(-1).view(np.uint8)
    for position in (0, len(bytes_) // 2, len(bytes_) - 1):
        for bit in (0, 7):
            bytes_[position] ^= np.uint8(1 << bit)
            with pytest.raises(RuntimeError, match=r"weights \(1, 17\) arrived"):
                weights.verify()
            bytes_[position] ^= np.uint8(1 << bit)
    weights.verify()


def test_arrays_that_change_places_are_seen() -> None:
    weights = sealed()
    arrays = weights.cost_model.arrays
    same = [n for n, a in arrays.items() if a.shape == arrays["gru.bias_ih_l0"].shape]
    assert len(same) == 4
    for other in same[1:]:
        changed = copy.deepcopy(weights)
        changed.cost_model.arrays[same[0]], changed.cost_model.arrays[other] = arrays[other], arrays[same[0]]
        with pytest.raises(RuntimeError, match="checksum"):
            changed.verify()
    changed = copy.deepcopy(weights)
    p = changed.policy
    p.obs_mean, p.obs_std = p.obs_std, p.obs_mean
    with pytest.raises(RuntimeError, match="checksum"):
        changed.verify()


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("policy", "activation", "relu"),
        ("policy", "squash_mean", False),
        ("cost_model", "active", False),
        ("cost_model", "visible", False),
        ("cost_model", "offsets", (0.0, 0.0)),
        ("cost_model", "version", 4),
    ],
)
def test_a_changed_setting_is_seen(part: str, name: str, value: Any) -> None:
    weights = sealed()
    assert getattr(getattr(weights, part), name) != value
    setattr(getattr(weights, part), name, value)
    with pytest.raises(RuntimeError, match="checksum"):
        weights.verify()


def test_another_version_is_seen() -> None:
    weights = sealed()
    weights.version = (1, 18)
    with pytest.raises(RuntimeError, match="checksum"):
        weights.verify()


def test_weights_that_were_never_sealed_are_refused() -> None:
    weights = sealed()
    weights.sum = None
    with pytest.raises(RuntimeError, match="checksum"):
        weights.verify()
