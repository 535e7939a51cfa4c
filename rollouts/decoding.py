"""How a masked diffusion model decodes a completion: steps, blocks, choice of positions. Loads no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from envs.errors import UserError

SELECTIONS = ("top_probability", "random", "low_confidence")
LOW_CONFIDENCE = (
    "low_confidence draws a proposal everywhere and keeps the likeliest: what it keeps is not distributed as "
    "the model's probabilities say, so no likelihood of it is exact (top_probability and random are)"
)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a completion is decoded; the settings that `rollout.options` may hold for this engine.

    steps: T; None: one for every `tokens_per_step` tokens. block_length: positions that must be full before
    the next ones begin, None: all of the completion. selection: which positions a step decodes:
    top_probability, those whose likeliest token is likeliest; random, uniform; low_confidence, those whose
    drawn proposals were likeliest. any_order: ask the model by the any-order rules (`rollouts.masked_model`),
    with a key-value cache unless `cache` is false.
    """

    steps: int | None = None
    tokens_per_step: int | None = None  # None: 1, or what `steps` leaves
    block_length: int | None = None
    selection: str = "top_probability"
    any_order: bool = False
    cache: bool = True

    def plan(self, length: int) -> list[tuple[int, int, int]]:
        """(first position, end, tokens) of each step, for `length` positions. Raises UserError."""
        where = "rollout.options."
        if self.selection not in SELECTIONS:
            raise UserError(f"unknown {where}selection", given=self.selection, allowed=SELECTIONS)
        for name in ("steps", "tokens_per_step", "block_length"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= length:
                raise UserError(
                    f"{where}{name} is out of range",
                    given=value,
                    allowed=f"1 to rollout.max_new_tokens={length}",
                )
        steps = self.steps if self.steps is not None else _whole(length, self.tokens_per_step or 1, where)
        each = _parts(length, steps, f"{where}steps", "rollout.max_new_tokens")
        if self.tokens_per_step not in (None, each):
            raise UserError(
                f"{where}steps and {where}tokens_per_step contradict each other",
                given=f"{steps} x {self.tokens_per_step} tokens, rollout.max_new_tokens={length}",
                fix="leave one of them out",
            )
        block = self.block_length or length
        blocks = _parts(length, block, f"{where}block_length", "rollout.max_new_tokens")
        in_block = _parts(block, each, f"{where}tokens_per_step", f"{where}block_length")
        return [(b * block, (b + 1) * block, each) for b in range(blocks) for _ in range(in_block)]


def _whole(length: int, each: int, where: str) -> int:
    return _parts(length, each, f"{where}tokens_per_step", "rollout.max_new_tokens")


def _parts(whole: int, part: int, name: str, of: str) -> int:
    if whole % part:
        raise UserError(
            f"{name} must divide {of}",
            given=f"{name}={part}, {of}={whole}",
            allowed=", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0),
        )
    return whole // part


def read_decoding(options: dict[str, Any]) -> tuple[Decoding, dict[str, Any]]:
    """The decoding among an engine's options, and the other options."""
    names = {field.name for field in dataclasses.fields(Decoding)}
    mine = {name: value for name, value in options.items() if name in names}
    return Decoding(**mine), {name: value for name, value in options.items() if name not in names}
