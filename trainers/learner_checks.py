"""What a learner's step must not do: lose a number to NaN, or change nothing. Names the first bad tensor.

Pure functions and small counters over tensors; when they are asked is `trainers.learner_mixin`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

GRADIENT = 1e-8  # a norm below it counts as no gradient
STEPS_UNCHANGED = 10  # of a low-precision model, in a row, before it is an error
SAMPLED = 4096  # elements of each tensor that are compared to estimate the share that changed


def first_bad(tensors: Iterable[tuple[str, Any]]) -> tuple[str, torch.Tensor] | None:
    """The first floating-point tensor that holds NaN or infinity, with its name."""
    for name, tensor in tensors:
        if torch.is_tensor(tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return name, tensor
    return None


def bad_rows(tensor: torch.Tensor) -> list[int]:
    """Rows (first dimension) that hold NaN or infinity."""
    flat = tensor.detach().reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    return torch.nonzero(~torch.isfinite(flat).all(dim=1)).flatten().tolist()


def explain_loss(
    model: nn.Module, inputs: Mapping[str, Any], again: Callable[[], Any]
) -> tuple[str, list[int]]:
    """Why a loss is not finite: (what was bad first, its rows in the micro-batch or []).

    Looks, in this order, at the inputs, at the parameters, and at the outputs of the modules while `again()`
    repeats the forward pass.
    """
    found = first_bad(inputs.items())
    if found is not None:
        return f"the input {found[0]!r}", bad_rows(found[1])
    found = first_bad(model.named_parameters())
    if found is not None:
        return f"the parameter {found[0]}", []
    seen: list[tuple[str, torch.Tensor]] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not seen:
                bad = first_bad((name, tensor) for tensor in _tensors(output))
                seen.extend([] if bad is None else [bad])

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            again()
    finally:
        for handle in handles:
            handle.remove()
    if seen:
        return f"the output of {seen[0][0]}", bad_rows(seen[0][1])
    return "the loss itself: every parameter and every module's output is finite", []


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this process holds."""
    return getattr(parameter, "ds_tensor", parameter).detach()


class ChangeWatch:
    """Notices a step that changed no byte of the trained parameters.

    Float32: an integer sum of each tensor's bits before and after, one pass over memory. Narrower types can
    round a whole step away without anything being wrong, so the share of changed elements is estimated on
    samples as well and an error is due only after STEPS_UNCHANGED steps of none.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.narrow = any(p.element_size() < 4 for p in self.parameters)
        self.unchanged = 0
        self._bits = self._sums()
        self._samples = self._sampled()

    def step(self) -> tuple[bool, float | None]:
        """(did any byte change since the last call, estimated share of changed elements or None)."""
        bits, share = self._sums(), None
        changed = not torch.equal(bits, self._bits)
        self._bits = bits
        if self.narrow:
            new = self._sampled()
            differ = sum(int((a != b).sum()) for a, b in zip(new, self._samples, strict=True))
            share = differ / max(1, sum(a.numel() for a in new))
            self._samples = new
        return changed, share

    def is_error(self, changed: bool, gradient: bool) -> bool:
        """Whether a step with this outcome breaks the rule; `gradient`: it had a rate and a gradient."""
        self.unchanged = 0 if changed or not gradient else self.unchanged + 1
        return self.unchanged >= (STEPS_UNCHANGED if self.narrow else 1)

    def _sums(self) -> torch.Tensor:
        ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        values = (_local(p).contiguous() for p in self.parameters)
        sums = [value.view(ints[value.element_size()]).sum(dtype=torch.int64) for value in values]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def _sampled(self) -> list[torch.Tensor]:
        if not self.narrow:
            return []
        flat = (_local(p).reshape(-1) for p in self.parameters)
        return [values[:: max(1, values.numel() // SAMPLED)].clone() for values in flat]
