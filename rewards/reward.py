"""What a reward says about one sample: a value, a named failure, or that it does not apply. Never 0 for
"the grader broke".
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """A finite number, and the named parts it was made of."""

    x: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The grader broke. `name` is short and counted: "timeout", "raised ValueError", "nan"."""

    name: str


@dataclass(frozen=True)
class NotApplicable:
    """This reward says nothing about this sample."""


Reward = Value | Failure | NotApplicable
