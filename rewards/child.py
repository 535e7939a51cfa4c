"""Rewards that are judged in a killable child process: untrusted ones, and ones that can take for ever.

A call that raises, hangs, allocates or prints without end, or dies, is a named failure of its samples, and
the next one gets a new child. A function that does not give one result a sample is told to the user.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from envs.errors import UserError
from rewards.child_process import ChildFault, ChildProcess, Limits
from rewards.reward import Failure, NotApplicable, Reward, Value, flat, regroup
from rollouts.samples import Sample

log = logging.getLogger(__name__)
NAMES = ("nan", "infinite", "type")  # of a single result's failure, see rewards.child_main
EACH_SHARE = 0.1  # of the deadline that one sample may take, where samples are judged one by one
EACH_LEAST_S = 1.0


class Judged(Protocol):
    """What is judged where. `each`: one call a sample, so that one cannot spoil the others."""

    name: str
    factory: str
    args: dict[str, Any]
    each: bool

    def request(self, samples: list[Sample]) -> dict[str, Any]:
        """What the judge is sent, in JSON's types."""


class TaskCheck:
    """A text task's own check."""

    factory, each = "rewards.judges:task_check", True

    def __init__(self, task: Any) -> None:
        self.name, self.args = task.cfg.task, {"config": asdict(task.cfg)}

    def request(self, samples: list[Sample]) -> dict[str, Any]:
        """See `Judged`."""
        return {"metas": [s.meta for s in samples], "completions": [s.completion for s in samples]}


class MathCheck:
    """math-verify against meta["answer"], an expression in LaTeX or plain numbers."""

    name, factory, each = "math", "rewards.judges:mathematics", True
    args: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def request(self, samples: list[Sample]) -> dict[str, Any]:
        """See `Judged`."""
        missing = next((s for s in samples if "answer" not in s.meta), None)
        if missing is not None:
            raise UserError(
                "the reward 'math' needs a reference answer",
                given=f"columns {sorted(missing.meta)}",
                fix="set env.columns={answer: <your name>}",
            )
        return {
            "answers": [str(s.meta["answer"]) for s in samples],
            "completions": [s.completion for s in samples],
        }


class UserFunction:
    """A TRL-style function; `meta` becomes its columns, as a dataset's would."""

    factory, each = "rewards.judges:user_function", False

    def __init__(self, name: str) -> None:
        self.name, self.args = name, {"name": name}

    def request(self, samples: list[Sample]) -> dict[str, Any]:
        """See `Judged`. Chat prompts and completions are lists of messages, as TRL has them."""
        names = sorted({name for s in samples for name in s.meta} - {"conversational"})
        return {
            **{name: [s.meta.get(name) for s in samples] for name in names},
            "prompts": [json.loads(s.prompt) if _chat(s) else s.prompt for s in samples],
            "completions": [
                [{"role": "assistant", "content": s.completion}] if _chat(s) else s.completion
                for s in samples
            ],
            "completion_ids": [list(map(int, s.completion_ids)) for s in samples],
        }


def _chat(sample: Sample) -> bool:
    return bool(sample.meta.get("conversational"))


@dataclass
class ChildRewarder:
    """Scores batches in a child that is started at the first and kept. deadline_s: of one batch."""

    judged: Judged
    deadline_s: float = 30.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s < math.inf:
            raise UserError("reward.deadline_s must be more than 0", given=self.deadline_s)
        self._child: ChildProcess | None = None
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"judged": self.judged, "deadline_s": self.deadline_s, "limits": self.limits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def score(self, groups: list[list[Sample]], ctx: Any) -> list[list[Reward]]:
        """See `rewards.reward.Rewarder`. Raises UserError for a function that can't be used at all."""
        samples = flat(groups)
        with self._lock:
            if not self.judged.each:
                return regroup(self._ask(samples, self.deadline_s), groups)
            limit = time.monotonic() + self.deadline_s
            results: list[Reward] = []
            for sample in samples:
                left = limit - time.monotonic()
                share = min(left, max(EACH_LEAST_S, EACH_SHARE * self.deadline_s))
                results += self._ask([sample], share) if left > 0 else [Failure("deadline")]
            return regroup(results, groups)

    def close(self) -> None:
        """End the child; the next batch starts another one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _ask(self, samples: list[Sample], deadline_s: float) -> list[Reward]:
        request = {**self.judged.request(samples), "n": len(samples)}
        try:
            json.dumps(request)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"a column can't be sent to the reward '{self.judged.name}': {error}",
                allowed="text, numbers, true, false, null, and lists and dicts of them",
            ) from error
        if self._child is None or not self._child.alive:
            self.close()
            self._child = ChildProcess(self.judged.factory, self.judged.args, self.limits)
        try:
            size = 4096 + 64 * len(samples)
            reply = self._child.call(request, deadline_s=deadline_s, reply_bytes=size)
        except ChildFault as fault:
            return self._failed(len(samples), fault.name, str(fault))
        if isinstance(reply.get("error"), str):
            return self._failed(len(samples), reply["error"][:64], str(reply.get("message"))[:500])
        if "shape" in reply:
            raise UserError(
                f"the reward '{self.judged.name}' must give one number or None per completion",
                given=str(reply["shape"])[:200],
                allowed=f"a list of {len(samples)}",
            )
        values = reply.get("values")
        if not isinstance(values, list) or len(values) != len(samples):
            return self._failed(len(samples), "protocol", "an answer that is not ours")
        return [self._result(value) for value in values]

    def _result(self, value: Any) -> Reward:
        if value is None:
            return NotApplicable()
        if isinstance(value, int | float) and math.isfinite(value):
            return Value(float(value))
        name = value if value in NAMES else "protocol"
        return self._failed(1, name, f"a result is {name}")[0]

    def _failed(self, n: int, name: str, message: str) -> list[Reward]:
        if name not in self._told:
            self._told.add(name)
            log.warning("reward %s failed (said once): %s", self.judged.name, message)
        return [Failure(name)] * n
