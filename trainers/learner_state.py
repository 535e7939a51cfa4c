"""State of a learner as a checkpoint tree and back: parameters, optimizer, schedule, random generators.

Everything is kept by parameter name, so a tree does not depend on the order of parameter groups or on how
the parameters were spread over processes. Pickles nothing; who writes the tree is `trainers.run`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from envs.errors import UserError

TUPLE, ITEMS = (
    "(tuple)",
    "(items)",
)  # tags for what JSON lacks: tuples, and dicts with other keys than strings


def encode(value: Any) -> Any:
    """A Python state (of a generator, schedule, callback) as nested dicts with string keys and lists."""
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not {TUPLE, ITEMS} & value.keys():
            return {key: encode(item) for key, item in value.items()}
        return {ITEMS: [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """Undo of `encode`."""
    if isinstance(value, dict):
        if value.keys() == {TUPLE}:
            return tuple(decode(item) for item in value[TUPLE])
        if value.keys() == {ITEMS}:
            return {decode(key): decode(item) for key, item in value[ITEMS]}
        return {key: decode(item) for key, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


# --- random generators


def rng_state() -> dict[str, Any]:
    """Of Python, NumPy and torch (CPU and, where there is one, CUDA) in this process."""
    state: dict[str, Any] = {
        "python": encode(random.getstate()),
        "numpy": encode(np.random.get_state()),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo of `rng_state`."""
    random.setstate(decode(state["python"]))
    np.random.set_state(decode(state["numpy"]))
    torch.set_rng_state(as_tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(as_tensor(state["cuda"]))


# --- parameters


def trained(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What training changes, by name: parameters with a gradient (adapters only, if there are), buffers."""
    yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    saved = model.state_dict().keys()
    yield from ((name, b) for name, b in model.named_buffers() if name in saved)


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained tensors by name. Copied only where a parameter must be put together from processes."""
    state = {}
    for name, tensor in trained(model):
        with whole(tensor):
            state[name] = tensor.detach().clone() if hasattr(tensor, "ds_id") else tensor.detach()
    return state


@torch.no_grad()
def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Undo of `model_state`. Raises UserError when names or shapes are not those of this model."""
    mine = dict(trained(model))
    check_names(mine, state, "parameters")
    for name, tensor in mine.items():
        value = as_tensor(state[name])
        with whole(tensor, write=True):
            if value.shape != tensor.shape:
                raise UserError(
                    f"the checkpoint's parameter {name} has another shape",
                    given=tuple(value.shape),
                    allowed=str(tuple(tensor.shape)),
                )
            tensor.copy_(value)


def whole(tensor: torch.Tensor, write: bool = False) -> contextlib.AbstractContextManager[Any]:
    """A parameter that ZeRO-3 keeps in parts is whole inside, on every process; all must enter."""
    if not hasattr(tensor, "ds_id"):
        return contextlib.nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([tensor], modifier_rank=0 if write else None)


def check_names(mine: Any, theirs: Any, what: str) -> None:
    """Raise UserError when a checkpoint holds other names than this learner."""
    missing, foreign = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    if missing or foreign:
        raise UserError(
            f"the checkpoint holds other {what} than this model",
            given=f"missing: {missing[:3]}, not of this model: {foreign[:3]}",
            fix="resume with the model and adapter settings that the run began with",
        )


# --- optimizer


def optimizer_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """State of each parameter by its name, and the settings of each group. `names` maps id(parameter)."""
    groups = optimizer.param_groups
    return {
        "state": {
            names[id(p)]: dict(optimizer.state[p])
            for group in groups
            for p in group["params"]
            if p in optimizer.state
        },
        "groups": [encode({k: v for k, v in group.items() if k != "params"}) for group in groups],
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str], state: dict[str, Any]
) -> None:
    """Undo of `optimizer_state`; torch's own `load_state_dict` puts each tensor where it belongs."""
    own = optimizer.state_dict()
    values: dict[int, Any] = {}
    known = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    check_names(known & set(state["state"]), state["state"], "optimizer states")
    for group, numbered in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for p, number in zip(group["params"], numbered["params"], strict=True):
            if names[id(p)] in state["state"]:
                values[number] = as_tensors(state["state"][names[id(p)]])
    groups = [
        {**decode(saved), "params": numbered["params"]}
        for saved, numbered in zip(state["groups"], own["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def zero_state(optimizer: Any) -> dict[str, Any]:
    """This process's part of a DeepSpeed ZeRO optimizer: flat float32 weights, their states, settings."""
    base, flats = optimizer.optimizer, _flat_parts(optimizer)
    return {
        "weights": [flat.detach() for flat in flats],
        "state": [dict(base.state[flat]) if flat in base.state else {} for flat in flats],
        "groups": [encode({k: v for k, v in group.items() if k != "params"}) for group in base.param_groups],
    }


@torch.no_grad()
def load_zero_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Undo of `zero_state`, in the process of the same rank among as many."""
    base, flats = optimizer.optimizer, _flat_parts(optimizer)
    for flat, weights, saved in zip(flats, state["weights"], state["state"], strict=True):
        flat.data.copy_(as_tensor(weights))
        base.state[flat] = {
            key: value.to(flat.device) if torch.is_tensor(value) and value.dim() else value
            for key, value in as_tensors(saved).items()
        }
    for group, saved in zip(base.param_groups, state["groups"], strict=True):
        group.update(decode(saved))


def _flat_parts(optimizer: Any) -> list[torch.Tensor]:
    """The flat float32 weights that stages 3 and 2 step on."""
    third = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return list(optimizer.single_partition_of_fp32_groups if third is None else third)


def as_tensors(values: dict[str, Any]) -> dict[str, Any]:
    """The values with tensors of their own memory in place of a checkpoint's NumPy arrays."""
    return {key: as_tensor(value) for key, value in values.items()}


def as_tensor(value: Any) -> Any:
    """A checkpoint's array as a tensor of its own memory (the array may be read-only); else the value."""
    return torch.tensor(value) if isinstance(value, np.ndarray | np.generic) else value
