"""What child processes load: a task's check, a user's function, a verifier. Knows nothing of processes.

Each function here returns a judge: a request (a dict with "n" and lists of that length) -> n results.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from typing import Any

Judge = Callable[[dict[str, Any]], Any]


def task_check(config: dict[str, Any]) -> Judge:
    """The check of the text task of this config. Request: metas, completions."""
    from envs.text_tasks import TextTaskConfig, make_task

    task = make_task(TextTaskConfig(**config))

    def judge(request: dict[str, Any]) -> list[float]:
        return [task.check(meta, text) for meta, text in zip(request["metas"], request["completions"])]

    return judge


def user_function(name: str) -> Judge:
    """A TRL-style function at "package.module:function", async ones too. Request: arguments by name.

    `log_extra` and `log_metric`, which TRL passes as well, do nothing here.
    """
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)

    def judge(request: dict[str, Any]) -> Any:
        arguments = {key: value for key, value in request.items() if key != "n"}
        arguments |= {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
        result = function(**arguments)
        return asyncio.run(_wait(result)) if inspect.isawaitable(result) else result

    return judge


def mathematics() -> Judge:
    """math-verify: is the completion's last answer equal to the reference? Request: answers, completions."""
    from math_verify import parse, verify

    def right(answer: str, completion: str) -> float:
        # The owner's deadline takes the place of math-verify's, whose signals could be caught.
        reference = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
        found = parse(completion, parsing_timeout=None)
        return float(verify(reference, found, timeout_seconds=None))

    def judge(request: dict[str, Any]) -> list[float]:
        return [right(a, c) for a, c in zip(request["answers"], request["completions"])]

    return judge


async def _wait(result: Any) -> Any:
    return await result


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
