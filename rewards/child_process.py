"""A child process that may be killed at any time, and its limits, all of which this side owns.

Results come back as JSON of bounded size and are never unpickled. Knows nothing of rewards.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.errors import UserError
from rewards.child_main import HEAD, descendants, kill_descendants, message_bytes

SCRIPT = Path(__file__).with_name("child_main.py")
CHECKOUT = str(SCRIPT.parent.parent)
POLL_S = 0.1  # between two looks at the memory
TAIL = 2000  # last bytes of what was printed, for messages
# What a child sees of the environment: no tokens, no credentials.
PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HF_HOME")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """memory_mb: of the child and all it starts together; output_bytes: printed during one call."""

    memory_mb: int = 2048
    output_bytes: int = 1 << 20
    start_s: float = 120.0


class ChildFault(Exception):
    """A call that gave no answer: "deadline", "memory", "output", "died" or "protocol". The child is gone."""

    def __init__(self, name: str, printed: str = "") -> None:
        super().__init__(f"{name}; printed last: {printed!r}" if printed else name)
        self.name = name


class ChildProcess:
    """One child that has loaded `factory(**args)` and answers calls; see `rewards.child_main`.

    factory: "package.module:function". Raises UserError when it can't be loaded there.
    """

    def __init__(self, factory: str, args: dict[str, Any], limits: Limits) -> None:
        self._limits, self._tail = limits, b""
        to_child, self._requests = os.pipe()
        self._replies, from_child = os.pipe()
        control, self._control = os.pipe()
        self._printed, output = os.pipe()
        inherited = (to_child, from_child, control)
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        self._popen = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        for fd in (*inherited, output):
            os.close(fd)
        mine = (self._requests, self._replies, self._control, self._printed)
        for fd in mine:
            os.set_blocking(fd, False)
        self._end = weakref.finalize(self, _end, self._popen, mine, os.getpid())
        first = {
            "path": [CHECKOUT, *(p or os.getcwd() for p in sys.path)],
            "memory": limits.memory_mb << 20,
            "factory": factory,
            "args": args,
        }
        self._start(factory, first)

    def _start(self, factory: str, first: dict[str, Any]) -> None:
        try:
            reply = self.call(first, deadline_s=self._limits.start_s, reply_bytes=1 << 16)
        except ChildFault as fault:
            reply = {"refused": str(fault)}
        if "ready" not in reply:
            self.close()
            raise UserError(
                f"{factory} can't be loaded in a child process: {reply.get('refused', 'no answer')}",
                allowed=f"to load within {self._limits.start_s:g} s and {self._limits.memory_mb} MB",
            )

    def call(self, request: dict[str, Any], *, deadline_s: float, reply_bytes: int) -> dict[str, Any]:
        """The child's answer. Raises ChildFault, after killing the child and all that it started."""
        try:
            return self._exchange(memoryview(message_bytes(request)), deadline_s, reply_bytes)
        except BaseException:  # also Ctrl-C: an answer to this call must not be taken for the next one's
            self.close()
            raise

    def _exchange(self, request: memoryview, deadline_s: float, reply_bytes: int) -> dict[str, Any]:
        reply, printed = bytearray(), 0
        now = time.monotonic()
        limit, look = now + deadline_s, now + POLL_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            selector.register(self._replies, selectors.EVENT_READ)
            selector.register(self._printed, selectors.EVENT_READ)
            while (now := time.monotonic()) < limit:
                if now >= look:
                    self._check_memory()
                    look = time.monotonic() + POLL_S
                for key, _ in selector.select(min(limit, look) - now):
                    if key.fd == self._requests:
                        request = self._write(request)
                        if not request:
                            selector.unregister(self._requests)
                    elif key.fd == self._printed:
                        chunk = os.read(self._printed, 1 << 16)
                        if not chunk:
                            selector.unregister(self._printed)
                        printed += len(chunk)
                        self._tail = (self._tail + chunk)[-TAIL:]
                        if printed > self._limits.output_bytes:
                            raise self._fault("output")
                    else:
                        chunk = os.read(self._replies, 1 << 16)
                        if not chunk:
                            raise self._fault("died")
                        reply += chunk
                        if len(reply) > HEAD.size + reply_bytes:
                            raise self._fault("output")
                        answer = self._parse(reply)
                        if answer is not None:
                            return answer
        raise self._fault("deadline")

    def _write(self, request: memoryview) -> memoryview:
        try:
            return request[os.write(self._requests, request) :]
        except BlockingIOError:
            return request
        except BrokenPipeError:  # the end of its replies says the rest
            return memoryview(b"")

    def _parse(self, reply: bytearray) -> dict[str, Any] | None:
        if len(reply) < HEAD.size or len(reply) - HEAD.size < HEAD.unpack_from(reply)[0]:
            return None
        try:
            answer = json.loads(reply[HEAD.size :])
        except (ValueError, RecursionError):
            raise self._fault("protocol") from None
        if not isinstance(answer, dict):
            raise self._fault("protocol")
        return answer

    def _check_memory(self) -> None:
        used = sum(map(_memory_kb, descendants(self._popen.pid)))
        if used > self._limits.memory_mb << 10:
            raise self._fault("memory")

    def _fault(self, name: str) -> ChildFault:
        return ChildFault(name, self._tail.decode(errors="replace").strip())

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._end.alive and self._popen.poll() is None

    def close(self) -> None:
        """Kill the child and all that it started."""
        self._end()


def _memory_kb(pid: int) -> int:
    """Memory of a process, what it shares divided among those who share it; 0 when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def _end(popen: subprocess.Popen[bytes], pipes: tuple[int, ...], owner: int) -> None:
    """Close the pipes, upon which the supervisor kills what is below it; if it doesn't, we do."""
    for fd in pipes:
        os.close(fd)
    if os.getpid() != owner:  # a fork of ours: the child is not its to kill
        return
    try:
        popen.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        kill_descendants(popen.pid)
        popen.kill()
        popen.wait()
    with contextlib.suppress(OSError):  # had the supervisor been killed from below, its session lived on
        os.killpg(popen.pid, signal.SIGKILL)
