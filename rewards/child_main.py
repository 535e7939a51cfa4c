"""What runs in the child process that `rewards.child_process` starts: a supervisor, and below it the worker.

The worker runs code that is not trusted. The supervisor adopts whatever the worker leaves behind (daemons
included) and kills all of it when the worker ends or its owner closes the control pipe, also by dying.
Standard library only; the script is run by path, and told its `sys.path` by the first message.
Messages on the pipes are JSON behind their length in 8 bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
FILE_BYTES = 64 << 20  # of one file that the worker writes
HEAD = struct.Struct(">Q")


def main(argv: list[str]) -> None:
    """argv: file descriptors of requests (read), replies (write) and control (read)."""
    requests, replies, control = map(int, argv)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    worker = os.fork()
    if worker == 0:
        os.close(control)
        try:
            serve(requests, replies)
        finally:
            os._exit(0)
    os.close(requests)
    os.close(replies)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    while not select.select([control], [], [], 0.5)[0]:
        if worker in reap():
            break
    kill_descendants(os.getpid())


# --- the worker


def serve(requests: int, replies: int) -> None:
    """Load what the first message names, then answer one message after another."""
    first = receive(requests)
    if first is None:
        return
    sys.path[:] = first["path"]
    resource.setrlimit(resource.RLIMIT_DATA, (first["memory"], first["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        judge = load(first["factory"])(**first["args"])
    except BaseException as error:
        send(replies, {"refused": describe(error)})
        return
    send(replies, {"ready": True})
    while (request := receive(requests)) is not None:
        send(replies, answer(judge, request))


def load(place: str) -> Any:
    """The object at "package.module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def answer(judge: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    """{"values": plain results}, {"shape": why it is not one result a sample} or {"error", "message"}."""
    try:
        result = judge(request)
        try:
            results = list(result)
        except TypeError:
            return {"shape": f"{type(result).__name__}, which is no list"}
        if len(results) != request["n"]:
            return {"shape": f"{len(results)} results"}
        return {"values": [plain(value) for value in results]}
    except BaseException as error:
        name = "memory" if isinstance(error, MemoryError) else type(error).__name__
        return {"error": name[:64], "message": describe(error)}


def plain(value: Any) -> float | str | None:
    """A number as a float, None as it is, else the name of what is wrong with it."""
    if hasattr(value, "item") and getattr(value, "size", None) != 0:  # NumPy's numbers, torch's tensors
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, int | float):
        return "type"
    try:
        number = float(value)
    except OverflowError:
        return "infinite"
    if number != number:
        return "nan"
    return "infinite" if number in (float("inf"), -float("inf")) else number


def describe(error: BaseException) -> str:
    """An exception in a line."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # an exception may be hostile, too
        return type(error).__name__[:500]


def receive(pipe: int) -> dict[str, Any] | None:
    """The next message; None at the end."""
    head = _read(pipe, HEAD.size)
    body = None if head is None else _read(pipe, HEAD.unpack(head)[0])
    return None if body is None else json.loads(body)


def _read(pipe: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(pipe, min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def send(pipe: int, message: dict[str, Any]) -> None:
    """Write one message."""
    body = message_bytes(message)
    while body:
        body = body[os.write(pipe, body) :]


def message_bytes(message: dict[str, Any]) -> bytes:
    """A message as it goes through a pipe."""
    body = json.dumps(message).encode()
    return HEAD.pack(len(body)) + body


# --- the supervisor


def descendants(root: int) -> list[int]:
    """Process ids below `root`, zombies aside."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", encoding="latin-1") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(name), state))
    found, todo = [], [root]
    while todo:
        for pid, state in children.get(todo.pop(), []):
            todo.append(pid)
            if state != "Z":
                found.append(pid)
    return found


def kill_descendants(root: int, patience_s: float = 10.0) -> None:
    """Kill everything below `root` until nothing is left; a process that forks meanwhile is found again."""
    limit = time.monotonic() + patience_s
    while (found := descendants(root)) and time.monotonic() < limit:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.005)


def reap() -> list[int]:
    """Ids of this process's children that have ended since the last call."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.append(pid)
    return ended


if __name__ == "__main__":
    main(sys.argv[1:])
