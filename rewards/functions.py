"""Rewards by name: the task's check, format, length, Countdown, Sudoku, mathematics, a user's functions.

    for name, weight, rewarder in make_rewards(["exact", "format"], [1.0, 0.1], task):
        rewarder.score(groups, ctx)

A user's function is named "package.module:function" and is called as TRL calls it:
f(prompts=, completions=, completion_ids=, <columns of meta>=...) -> one number or None a completion. It runs
in a child process (`rewards.child`), as do a task's checks and verifiers that could hang or run what a
completion says. Knows no policy and no loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.errors import UserError, nearest
from rewards.reward import (
    Failure,
    NotApplicable,
    Reward,
    Rewarder,
    Value,
    WeightedRewarder,
)
from rollouts.samples import Sample

Groups = list[list[Sample]]
LENGTH = 64  # tokens that the reward "length" counts as 1


@dataclass
class Each:
    """A trusted reward of one sample at a time, computed here. An exception is a failure of that sample."""

    judge: Callable[[Sample], float | None]

    def score(self, groups: Groups, ctx: Any) -> list[list[Reward]]:
        """See `rewards.reward.Rewarder`."""
        return [[self._one(sample) for sample in group] for group in groups]

    def _one(self, sample: Sample) -> Reward:
        try:
            return as_reward(self.judge(sample))
        except Exception as error:
            return Failure(type(error).__name__)


def as_reward(result: Any) -> Reward:
    """What a function gave for one sample: a finite number, True or False, or None (not applicable).

    NaN and infinity are the failures "nan" and "infinite"; anything else is the failure "type".
    """
    if result is None:
        return NotApplicable()
    if isinstance(result, bool | int | float | np.bool_ | np.integer | np.floating):
        try:
            number = float(result)
        except OverflowError:
            return Failure("infinite")
        if np.isfinite(number):
            return Value(number)
        return Failure("nan" if np.isnan(number) else "infinite")
    return Failure("type")


# --- the named ones


@dataclass
class Exact:
    """The task's own check."""

    task: Any

    def __call__(self, sample: Sample) -> float:
        return float(self.task.check(sample.meta, sample.completion))


@dataclass
class Format:
    """1 when the completion matches the task's pattern from end to end (blanks around it aside), else 0."""

    pattern: str

    def __call__(self, sample: Sample) -> float:
        import re

        return float(re.fullmatch(self.pattern, sample.completion.strip(), re.DOTALL) is not None)


def length(sample: Sample) -> float:
    """Completion tokens / 64: a canary, which rises when learning works at all."""
    return len(sample.completion_ids) / LENGTH


def countdown(sample: Sample) -> float | None:
    """1 when the completion is an expression over exactly meta["numbers"] that is worth meta["target"]."""
    from envs.countdown import reaches

    if not {"numbers", "target"} <= sample.meta.keys():
        return None
    return float(reaches(list(sample.meta["numbers"]), sample.meta["target"], sample.completion))


def sudoku(sample: Sample) -> float | None:
    """1 when the completion solves the 4x4 grid of meta["puzzle"]."""
    from envs.sudoku import solves

    return float(solves(sample.meta["puzzle"], sample.completion)) if "puzzle" in sample.meta else None


def _exact(task: Any, deadline_s: float) -> Rewarder:
    if task.untrusted_check:
        from rewards.child import ChildRewarder, TaskCheck

        return ChildRewarder(TaskCheck(task), deadline_s=deadline_s)
    return Each(Exact(task))


def _format(task: Any, deadline_s: float) -> Rewarder:
    if task.pattern is None:
        raise UserError(
            "the reward 'format' needs a task with a pattern",
            given=type(task).__name__,
            fix="leave it out of reward.names, or name a function of yours as package.module:function",
        )
    return Each(Format(task.pattern))


def _math(task: Any, deadline_s: float) -> Rewarder:
    from rewards.child import ChildRewarder, MathCheck

    return ChildRewarder(MathCheck(), deadline_s=deadline_s)


REWARDS: dict[str, Callable[[Any, float], Rewarder]] = {
    "exact": _exact,
    "format": _format,
    "length": lambda task, deadline_s: Each(length),
    "countdown": lambda task, deadline_s: Each(countdown),
    "sudoku": lambda task, deadline_s: Each(sudoku),
    "math": _math,
}


def check_rewards(names: Sequence[str]) -> None:
    """Raise UserError for a reward that does not exist, without loading its module."""
    if not names:
        raise UserError("reward.names is empty: nothing would be learned", fix="reward.names=[exact]")
    for name in names:
        if list(names).count(name) > 1:
            raise UserError("a reward is named twice", given=name, fix="give it one weight")
        if name in REWARDS:
            if name == "math" and importlib.util.find_spec("math_verify") is None:
                raise UserError(
                    "the reward 'math' needs math-verify",
                    fix="pip install 'math-verify>=0.8,<1' (the extra 'data')",
                )
            continue
        module, colon, function = name.partition(":")
        if not colon or not function.isidentifier():
            raise UserError(
                f"unknown reward '{name}'",
                allowed=nearest(name, REWARDS),
                fix="name one of them, or a function of yours as package.module:function",
            )
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UserError(
                f"the module of the reward '{name}' can't be found",
                given=module,
                fix="start from the folder that holds it, or put that folder on PYTHONPATH",
            )


def make_rewards(
    names: Sequence[str], weights: Sequence[float] | None, task: Any, *, deadline_s: float = 30.0
) -> list[WeightedRewarder]:
    """The named rewards with their weights (None: 1 each). deadline_s: of one batch in a child process."""
    check_rewards(names)
    if weights is None:
        weights = [1.0] * len(names)
    if len(weights) != len(names) or not np.isfinite(list(weights)).all():
        raise UserError("every reward needs one finite weight", given=list(weights), allowed=list(names))
    made = []
    for name, weight in zip(names, weights):
        if name in REWARDS:
            rewarder = REWARDS[name](task, deadline_s)
        else:
            from rewards.child import ChildRewarder, UserFunction

            rewarder = ChildRewarder(UserFunction(name), deadline_s=deadline_s)
        made.append(WeightedRewarder(name, float(weight), rewarder))
    return made
