"""What a reward is: a value, a named failure, or not applicable. Knows no model, no process and no task.

"The grader broke" is never 0.0: a failed sample is masked before a loss is formed (`trainers.feed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from rollouts.samples import Sample


@dataclass(frozen=True)
class Value:
    """A finite reward, and what it is made of, by name (shown to readers, not learned from)."""

    x: float
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in (("x", self.x), *self.parts.items()):
            if not math.isfinite(number):
                raise ValueError(f"a reward is a finite number, not {name}={number}")


@dataclass(frozen=True)
class Failure:
    """The reward could not be had; `name` says why in a word that can be counted: "deadline", "nan"."""

    name: str


@dataclass(frozen=True)
class NotApplicable:
    """This reward has nothing to say about this sample; the others decide."""


Reward = Value | Failure | NotApplicable


class Rewarder(Protocol):
    """Judges whole groups. A single object, called with batch after batch; picklable before its first."""

    def score(self, groups: list[list[Sample]], ctx: Any) -> list[list[Reward]]:
        """One reward per sample of every group, in their order; ctx: see `trainers.feed.RewardContext`."""


class WeightedRewarder(NamedTuple):
    """One of the rewards whose weighted sum is learned from."""

    name: str
    weight: float
    rewarder: Rewarder


def combine(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """The weighted sum of the applicable rewards of one sample; parts: each value, unweighted.

    Any failure makes the whole a failure (the first, by name of the reward: "format:deadline"); a sample to
    which none applies is not applicable.
    """
    values = {}
    for name, reward in rewards.items():
        if isinstance(reward, Failure):
            return Failure(f"{name}:{reward.name}")
        if isinstance(reward, Value):
            values[name] = reward.x
    if not values:
        return NotApplicable()
    return Value(math.fsum(weights[name] * x for name, x in values.items()), values)


def flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """The members of all groups, in order."""
    return [member for group in groups for member in group]


def regroup(results: Sequence[Any], groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Undo of `flat`: the results, in groups as large as `groups`."""
    rest = iter(results)
    return [[next(rest) for _ in group] for group in groups]
