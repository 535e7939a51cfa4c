"""`gru_sequence` against torch.nn.GRU: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers.gru import gru_sequence


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1, 3), (40, 7, 5)])
def test_equals_torch(layers: int, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    gru = nn.GRU(shape[2], 6, layers)
    x = torch.randn(shape, requires_grad=True)
    weights = torch.randn(shape[0], shape[1], 6)  # every state gets its own upstream gradient

    def gradients(states: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((states * weights).sum(), [x, *gru.parameters()]))

    ours, theirs = gru_sequence(gru, x), gru(x)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
