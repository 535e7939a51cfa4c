"""Reward functions that misbehave, each in one way. Named by path in tests; importing this does nothing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def good(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def counts(
    prompts: list[str],
    completions: list[str],
    completion_ids: list[list[int]],
    weight: list[float],
    log_metric: Any,
    **columns: Any,
) -> list[float]:
    """Reads everything that TRL hands over."""
    log_metric("seen", len(prompts))
    assert set(columns) == {"word", "trainer_state", "log_extra"}, sorted(columns)
    return [
        w * (len(ids) + c.count(x))
        for w, ids, c, x in zip(weight, completion_ids, completions, columns["word"])
    ]


async def later(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    import asyncio

    await asyncio.sleep(0.01)
    return good(prompts, completions)


def abstains(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None for _ in completions]


def raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    raise ZeroDivisionError("on purpose")


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(3600)
    return good(prompts, completions)


def hangs_deaf(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    import signal

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def nan(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("nan") for _ in completions]


def infinite(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("inf") for _ in completions]


def too_few(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return good(prompts, completions)[:-1]


def too_many(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [*good(prompts, completions), 0.0]


def a_number(prompts: list[str], completions: list[str], **columns: Any) -> float:
    return 1.0


def numpy_bool(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
    import numpy as np

    return [np.bool_(bool(text)) for text in completions]


def prints(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    while True:
        print("x" * 65536)
        sys.stderr.write("y" * 65536)


def forks(prompts: list[str], completions: list[str], pids: list[str], **columns: Any) -> list[float]:
    """Leaves a child and a daemon of its own session behind (their ids in a file), then waits."""
    ids = []
    for detach in (False, True):
        pid = os.fork()
        if pid == 0:
            if detach:
                os.setsid()
            time.sleep(3600)
            os._exit(0)
        ids.append(pid)
    Path(pids[0]).write_text(" ".join(map(str, ids)))
    time.sleep(3600)
    return good(prompts, completions)


def allocates(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    held = []
    while True:
        held.append(bytearray(16 << 20))


def exits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    os._exit(0)


def crashes(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    os.abort()


def closes_pipes(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    os.closerange(0, 256)
    time.sleep(3600)
    return good(prompts, completions)


class Bomb:
    """Writes a file in whatever process unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


def bomb(prompts: list[str], completions: list[str], mark: list[str], **columns: Any) -> list[Any]:
    return [Bomb(path) for path in mark]


def unpicklable(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
    return [lambda: 0 for _ in completions]


def enormous(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
    return ["9" * (64 << 20) for _ in completions]


def forks_and_allocates(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Each process fills 100 MB with bytes of its own."""
    for _ in range(5):
        if os.fork() == 0:
            break
    held = os.urandom(1 << 20) * 100
    time.sleep(3600)
    return [float(len(held)) for _ in completions]


def sees_token(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("HF_TOKEN" in os.environ) for _ in completions]
