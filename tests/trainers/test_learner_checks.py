"""The checks of a learner's step, on tensors small enough to see through."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from trainers.learner_checks import (
    STEPS_UNCHANGED,
    ChangeWatch,
    bad_rows,
    explain_loss,
    first_bad,
)


def test_the_first_bad_tensor_by_name() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.inf])
    assert first_bad([("a", good), ("ids", torch.tensor([1])), ("text", "nan")]) is None
    found = first_bad([("a", good), ("b", bad), ("c", bad * math.nan)])
    assert found is not None
    assert found[0] == "b"


def test_rows_that_hold_a_bad_number() -> None:
    tensor = torch.zeros(4, 2, 3)
    tensor[1, 0, 2], tensor[3, 1, 1] = math.nan, -math.inf
    assert bad_rows(tensor) == [1, 3]
    assert bad_rows(torch.tensor(math.nan)) == [0]
    assert bad_rows(torch.zeros(2)) == []


class Net(nn.Module):
    """Two layers; `log` makes the second one's output NaN where the first one's is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)
        self.log = False

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        return {"loss": self.second(hidden.log() if self.log else hidden).mean()}


def test_a_bad_input_comes_before_all_else() -> None:
    net = Net()
    net.first.weight.data.fill_(math.nan)
    x = torch.tensor([[1.0], [math.nan]])
    assert explain_loss(net, {"x": x}, lambda: net(x)) == ("the input 'x'", [1])


def test_a_bad_parameter_is_named() -> None:
    net = Net()
    net.second.weight.data.fill_(math.inf)
    x = torch.ones(2, 1)
    assert explain_loss(net, {"x": x}, lambda: net(x)) == ("the parameter second.weight", [])


def test_the_first_module_whose_output_is_bad_is_named_with_its_rows() -> None:
    net = Net()
    net.log = True
    x = torch.tensor([[1.0], [-1.0], [2.0]])
    assert explain_loss(net, {"x": x}, lambda: net(x)) == ("the output of second", [1])
    assert not net.first._forward_hooks
    assert not net.second._forward_hooks


def test_nothing_bad_but_the_loss() -> None:
    net, x = Net(), torch.ones(2, 1)
    what, rows = explain_loss(net, {"x": x}, lambda: net(x))
    assert what.startswith("the loss itself")
    assert rows == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_changed_bit_is_a_change(dtype: torch.dtype) -> None:
    weights = [torch.ones(1000, dtype=dtype), torch.ones(3, dtype=dtype)]
    watch = ChangeWatch(weights)
    assert watch.step() == (False, None)
    weights[0][777] = torch.nextafter(weights[0][777], torch.tensor(2.0, dtype=dtype))
    assert watch.step() == (True, None)
    assert watch.step() == (False, None)
    weights[1][0] = 2  # the same sum of values in all, other bits in each tensor
    weights[1][1] = 0
    assert watch.step() == (True, None)


def test_without_rate_or_gradient_nothing_need_change() -> None:
    watch = ChangeWatch([torch.ones(2)])
    assert not watch.is_error(changed=False, gradient=False)
    assert not watch.is_error(changed=True, gradient=True)
    assert watch.is_error(changed=False, gradient=True)


def test_narrow_types_may_stand_still_for_a_while() -> None:
    weights = torch.ones(10_000, dtype=torch.bfloat16)
    watch = ChangeWatch([weights])
    for _ in range(STEPS_UNCHANGED - 1):
        changed, share = watch.step()
        assert (changed, share) == (False, 0.0)
        assert not watch.is_error(changed, gradient=True)
    weights[:2500] = 2
    changed, share = watch.step()
    assert changed
    assert share == pytest.approx(0.25, abs=0.001)
    assert not watch.is_error(changed, gradient=True)
    errors = [watch.is_error(watch.step()[0], gradient=True) for _ in range(STEPS_UNCHANGED)]
    assert errors == [False] * (STEPS_UNCHANGED - 1) + [True]
