"""A learner's state as a checkpoint tree: what goes in comes back, through a real file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from envs.errors import UserError
from trainers import learner_state as state
from trainers.checkpoint import load_checkpoint, save_checkpoint


def through_disk(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    return load_checkpoint(save_checkpoint(folder, 1, tree, keep=1))[1]


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, None), [3.5, (True,)]),
        {1: "a", "b": (2,)},
        {(1, 2): {"x": ()}},
        {"(tuple)": [1], "(items)": 2},  # a user's keys that look like our tags
        {"(tuple)": 1},
        [],
        {},
        -0.0,
    ],
)
def test_tuples_and_other_keys_come_back(value: Any, tmp_path: Path) -> None:
    back = state.decode(through_disk({"value": state.encode(value)}, tmp_path)["value"])
    assert back == value
    assert repr(back) == repr(value)


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.standard_normal(), random.gauss(0, 1)  # both now hold a spare number
    saved = through_disk(state.rng_state(), tmp_path)

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.randn(3).sum().item()]

    first = draw()
    assert draw() != first
    state.set_rng_state(saved)
    assert draw() == first


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, bias=False))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = (model(torch.randn(8, 3)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_model_and_optimizer_go_on_where_they_were(name: str, tmp_path: Path) -> None:
    """Two groups, batch-norm buffers, and groups listed in another order than the parameters."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, dict[int, str]]:
        model = net()
        late, early = list(model[2].parameters()), [*model[0].parameters(), *model[1].parameters()]
        optimizer = MAKERS[name]([{"params": late, "weight_decay": 0.1}, {"params": early}])
        return model, optimizer, {id(p): n for n, p in model.named_parameters()}

    model, optimizer, names = make()
    steps(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 5e-3
    tree = {
        "m": state.model_state(model),
        "o": state.optimizer_state(optimizer, names),
        "r": state.rng_state(),
    }
    tree = through_disk(tree, tmp_path)
    expected = steps(model, optimizer, 3)

    other, second, names = make()
    state.load_model_state(other, tree["m"])
    state.load_optimizer_state(second, names, tree["o"])
    state.set_rng_state(tree["r"])
    assert steps(other, second, 3) == expected
    assert second.param_groups[0]["lr"] == 5e-3
    assert [type(g.get("betas")) for g in second.param_groups] == [
        type(g.get("betas")) for g in optimizer.param_groups
    ]


def test_an_optimizer_that_took_no_step_has_no_state(tmp_path: Path) -> None:
    model = net()
    optimizer = MAKERS["adamw"](model.parameters())
    names = {id(p): n for n, p in model.named_parameters()}
    tree = through_disk(state.optimizer_state(optimizer, names), tmp_path)
    assert tree["state"] == {}
    state.load_optimizer_state(optimizer, names, tree)


def test_bfloat16_comes_back(tmp_path: Path) -> None:
    model = net().to(torch.bfloat16)
    want = {name: tensor.clone() for name, tensor in state.model_state(model).items()}
    tree = through_disk(state.model_state(model), tmp_path)
    for p in model.parameters():
        p.data.zero_()
    state.load_model_state(model, tree)
    assert all(torch.equal(tensor, want[name]) for name, tensor in state.model_state(model).items())


def test_frozen_and_tied_parameters_are_not_kept_twice() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    model[2].weight = nn.Parameter(torch.zeros(1, 4))
    tied = nn.ModuleDict({"a": model[2], "b": model[2]})
    assert set(state.model_state(tied)) == {"a.weight"}
    assert "0.weight" not in state.model_state(model)
    assert {"1.running_mean", "1.num_batches_tracked"} <= set(state.model_state(model))


def test_other_names_and_shapes_are_told() -> None:
    tree = {name: np.asarray(tensor) for name, tensor in state.model_state(net()).items()}
    missing = {name: value for name, value in tree.items() if name != "0.bias"}
    with pytest.raises(UserError, match="other parameters than this model") as error:
        state.load_model_state(net(), {**missing, "9.bias": np.zeros(1)})
    assert "missing: ['0.bias'], not of this model: ['9.bias']" in str(error.value)
    with pytest.raises(UserError, match=r"parameter 0.bias has another shape"):
        state.load_model_state(net(), {**tree, "0.bias": np.zeros(7, np.float32)})
    before = net()
    kept = {n: t.clone() for n, t in state.model_state(before).items()}
    with pytest.raises(UserError):
        state.load_model_state(before, {**tree, "2.weight": np.zeros((7, 7), np.float32)})
    assert kept.keys() == tree.keys()
