"""Any generator of reasoning-gym as a text task, `reasoning_gym/<generator>`: its problems, its verifier.

env.options are the generator's own settings. Right is what its verifier gives full marks, in the last
<answer>...</answer> of a completion, or in the whole of it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

from envs.errors import UserError, nearest
from envs.reasoning_gym_server import thaw
from envs.text_tasks import GYM, GeneratedTask, Problem, TextTaskConfig

DEADLINE_S = 300.0  # of one problem, or of loading the generators
SERVER = Path(__file__).with_name("reasoning_gym_server.py")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CHOICES = ({"true", "false"}, {"yes", "no"})


class ReasoningGymTask(GeneratedTask):
    """See the module. Problems come from a process of their own; verifiers may run what an answer says."""

    untrusted_check = True

    def __init__(self, cfg: TextTaskConfig) -> None:
        super().__init__(cfg)
        self.name = cfg.task
        self.generator = cfg.task.removeprefix(f"{GYM}/")
        for name in ("seed", "size"):
            if name in cfg.options:
                raise UserError(
                    f"env.options.{name} is ours", fix="use env.seed, env.train_size, env.eval_size"
                )
        if self.generator == "composite":
            raise UserError("composite is made of other generators", fix="name one of them")
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._size = 1
        self._ask()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def problem(self, split: str, index: int, attempt: int) -> Problem:
        """See `GeneratedTask`."""
        chunk, at = divmod(index, self._size)
        place = f"{self.name}/{self.seed}/{split}/{chunk}/{attempt}"
        reply = self._ask({"seed": zlib.crc32(place.encode()) >> 1, "index": at})
        if "error" in reply:
            raise UserError(
                f"{self.name} can't make problem {index}: {reply['error']}", given=self.cfg.options
            )
        entry = reply["entry"]
        meta = {"answer": reply["shown"] or entry["answer"], "entry": entry}
        return Problem(text=entry["question"], shown=reply["shown"], meta=meta)

    def check(self, meta: dict[str, Any], completion: str) -> float:
        """1 when the generator's verifier gives full marks, else 0."""
        found = ANSWER.findall(completion)
        answer, entry = (found[-1] if found else completion).strip(), thaw(meta["entry"])
        oracle = entry["answer"]
        if isinstance(oracle, str):
            for choice in CHOICES:  # verifiers take any other word for the second choice
                if oracle.strip().lower() in choice:
                    return float(answer.lower() == oracle.strip().lower())
        try:
            return float(_verifier(self.generator, json.dumps(self.cfg.options))(answer, entry) >= 1.0)
        except Exception:  # verifiers raise what they like on answers that they can't read
            return 0.0

    def _ask(self, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """The process's answer; starts it first if there is none. Raises UserError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            return self._exchange(self._process, request) if request is not None else {}

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )
        first = self._exchange(process, {"name": self.generator, "options": self.cfg.options})
        if "size" in first:
            self._size = first["size"]
            return process
        process.kill()
        if "unknown" in first:
            raise UserError(
                f"reasoning-gym has no generator '{self.generator}'",
                allowed=[f"{GYM}/{name}" for name in nearest(self.generator, first["unknown"])],
                fix="see reasoning_gym.factory.DATASETS for all of them",
            )
        missing = "No module named 'reasoning_gym'" in first["error"]
        raise UserError(
            f"{self.name} can't be made: {first['error']}",
            given=self.cfg.options or None,
            fix="pip install 'reasoning-gym>=0.1.23,<0.2' (the extra 'data')" if missing else None,
        )

    def _exchange(self, process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise UserError(f"the process that makes the problems of {self.name} ended or took too long",
                            allowed=f"{DEADLINE_S:g} s a problem")  # fmt: skip
        answer: dict[str, Any] = json.loads(line)
        return answer


@functools.lru_cache(maxsize=4)
def _verifier(generator: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(generator, seed=0, **json.loads(options)).score_answer
