"""Text tasks: prompts with answers that can be checked. Knows no tokenizer, model or reward; loads little.

    task = make_task(TextTaskConfig(task="countdown"))
    prompt = task.train(0)
    task.check(prompt.meta, task.demonstration(0)) == 1.0

Every task is a pure function of its config: the same prompts in every process, training and evaluation
apart. Words of the built-in tasks are separated by single spaces, so that a word-level tokenizer is exact.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

from envs.errors import UserError, nearest

TASKS = {
    "chained_arithmetic": "envs.chained_arithmetic:ChainedArithmetic",
    "countdown": "envs.countdown:Countdown",
    "sudoku4": "envs.sudoku:Sudoku4",
    "dataset": "envs.dataset_task:DatasetTask",
}
GYM = "reasoning_gym"  # reasoning_gym/<generator>
EVAL_SIZE = 200
HELD_OUT = 5  # one in so many problems belongs to the evaluation


@dataclass(kw_only=True)
class TextTaskConfig:
    """Which task, and its settings.

    task: a name in TASKS, or reasoning_gym/<generator>. options: the task's own settings. train_size None:
    all there are (endless where prompts are made up). path: for dataset, a .jsonl, .json or .parquet file, a
    folder of `save_to_disk`, or a name on the hub; columns: {prompt: <its name there>, answer: ...}.
    """

    kind: str = "text"
    task: str = "chained_arithmetic"
    id: str = ""  # for run names; empty: from the task
    options: dict[str, Any] = field(default_factory=dict)
    train_size: int | None = None
    eval_size: int | None = None
    seed: int = 0
    path: str | None = None
    columns: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.id or self.task.replace("/", "-").replace("_", "-")


@dataclass(kw_only=True)
class Prompt:
    """Either `text` or `messages` (chat), and what `check` and reward functions may know of it (JSON)."""

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class TextTask:
    """What all tasks have. `train(i)` for 0 <= i < train_size (None: endless), `eval(i)` for i < eval_size.

    cfg: what `make_task` made it of.
    pattern: a regular expression that well-formed completions match from end to end, or None.
    untrusted_check: `check` may run for ever or run what a completion says; call it in a child process.
    """

    cfg: TextTaskConfig
    train_size: int | None
    eval_size: int
    pattern: str | None = None
    untrusted_check = False

    def train(self, index: int) -> Prompt:
        """Prompt `index` of the training split."""
        raise NotImplementedError

    def eval(self, index: int) -> Prompt:
        """Prompt `index` of the evaluation split."""
        raise NotImplementedError

    def check(self, meta: dict[str, Any], completion: str) -> float:
        """How right a completion is, in [0, 1]: 1 right, 0 wrong. Never raises for a completion."""
        raise NotImplementedError

    def demonstration(self, index: int) -> str | None:
        """A right completion of `train(index)`; None when the task knows none."""
        return None

    def vocabulary(self) -> list[str] | None:
        """Every word of prompts and right completions; None when texts are open."""
        return None


@dataclass(kw_only=True)
class Problem:
    """One problem that a task made up: its prompt, a right completion if known, and the prompt's meta."""

    text: str
    shown: str | None
    meta: dict[str, Any]


class GeneratedTask(TextTask):
    """A task that draws problems. Which split one belongs to is decided by its `key`, not by its index."""

    name: str

    def __init__(self, cfg: TextTaskConfig) -> None:
        self.cfg, self.seed = cfg, cfg.seed
        self.train_size = cfg.train_size
        self.eval_size = EVAL_SIZE if cfg.eval_size is None else cfg.eval_size
        self._held_out: list[Problem] = []
        self._tried = 0

    def draw(self, rng: random.Random) -> Problem:
        """A problem, from this noise alone."""
        raise NotImplementedError

    def problem(self, split: str, index: int, attempt: int) -> Problem:
        """The problem that is tried `attempt`-th for a place, until one belongs to the split."""
        return self.draw(random.Random(f"{self.name}/{self.seed}/{split}/{index}/{attempt}"))

    def key(self, problem: Problem) -> str:
        """Equal for problems that must not be in both splits."""
        return problem.text

    def train(self, index: int) -> Prompt:
        """See `TextTask`."""
        problem = self._train(index)
        return Prompt(id=f"train-{index}", text=problem.text, meta=problem.meta)

    def demonstration(self, index: int) -> str | None:
        """See `TextTask`."""
        return self._train(index).shown

    def eval(self, index: int) -> Prompt:
        """See `TextTask`. All evaluation prompts differ."""
        check_index(index, self.eval_size)
        while len(self._held_out) <= index:
            problem = self._draw("eval", self._tried, held_out=True)
            self._tried += 1
            if all(self.key(problem) != self.key(other) for other in self._held_out):
                self._held_out.append(problem)
            elif self._tried > 50 * self.eval_size:
                raise self._too_few(f"{len(self._held_out)} different ones for evaluation")
        problem = self._held_out[index]
        return Prompt(id=f"eval-{index}", text=problem.text, meta=problem.meta)

    def _train(self, index: int) -> Problem:
        check_index(index, self.train_size)
        return self._draw("train", index, held_out=False)

    def _draw(self, split: str, index: int, held_out: bool) -> Problem:
        for attempt in range(1000):
            problem = self.problem(split, index, attempt)
            if (zlib.crc32(self.key(problem).encode()) % HELD_OUT == 0) == held_out:
                return problem
        raise self._too_few(f"none of 1000 belongs to the {split} split")

    def _too_few(self, found: str) -> UserError:
        return UserError(
            f"the settings of {self.name} leave too few different problems",
            given=found,
            fix="make the problems larger with env.options, or env.eval_size smaller",
        )


def make_task(cfg: TextTaskConfig) -> TextTask:
    """The task of a config. Raises UserError for a name or setting that does not exist."""
    module, _, name = _place(cfg.task).partition(":")
    task: TextTask = getattr(importlib.import_module(module), name)(cfg)
    return task


def check_task_config(cfg: TextTaskConfig) -> None:
    """Raise UserError for a task that cannot be made. Reads no dataset."""
    _place(cfg.task)
    for name, size in (("train_size", cfg.train_size), ("eval_size", cfg.eval_size)):
        if size is not None and size < 1:
            raise UserError(f"env.{name} must be at least 1", given=size)
    if cfg.task == "dataset":
        from envs.dataset_task import check_dataset_config

        check_dataset_config(cfg)
    else:
        make_task(cfg)


def _place(task: str) -> str:
    if task in TASKS:
        return TASKS[task]
    if task.startswith(f"{GYM}/"):
        return "envs.reasoning_gym_task:ReasoningGymTask"
    raise UserError(
        f"unknown task '{task}'",
        allowed=[*nearest(task, [*TASKS, f"{GYM}/<generator>"])],
        fix="set env.task to one of them",
    )


def read_options(cls: type[Any], options: dict[str, Any]) -> Any:
    """`options` as the dataclass `cls`. Raises UserError with the nearest names for an unknown one."""
    known = [f.name for f in dataclasses.fields(cls)]
    for name in options:
        if name not in known:
            raise UserError(f"unknown setting env.options.{name}", allowed=nearest(name, known))
    return cls(**options)


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """Raise UserError unless env.options.<name> is a whole number in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"env.options.{name} must be a whole number", given=value, allowed=f"{low} to {high}")


def check_index(index: int, size: int | None) -> None:
    """Raise IndexError unless 0 <= index < size (None: endless)."""
    if index < 0 or (size is not None and index >= size):
        raise IndexError(f"prompt {index} of {size}")
