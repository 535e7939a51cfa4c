"""An engine without a model: its tokens can be said in advance, its faults are ordered through files.

Completion j of a request with seed s is [s[-1], j, weight], where weight is the published tensor "w" (0
before anything was published). A file `<folder>/<fault>` makes the next worker that finds it (and removes
it) die, hang or raise.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from rollouts.samples import Request, Sample, sample_id


class ToyEngine:
    """options: folder (of the faults), batches_callers, seconds (a call takes)."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        deterministic: bool,
        folder: str = "",
        batches_callers: bool = False,
        seconds: float = 0.0,
    ):
        self.folder, self.batches_callers, self.seconds = folder, batches_callers, seconds
        self.version = (0, 0)
        self.weight = 0
        self.calls: list[int] = []
        if model_path == "missing":
            raise UserError("no model here", given=model_path)

    def generate(self, requests: list[Request]) -> list[list[Sample]]:
        self.calls.append(len(requests))
        self._fault("generate")
        time.sleep(self.seconds)
        if any(r.meta.get("bad") for r in requests):
            raise UserError("a bad request", given="bad")
        return [[self._sample(r, j) for j in range(r.n)] for r in requests]

    def load_weights(self, packed: Any) -> None:
        self._fault("load")
        self.weight = int(packed.tensors()["w"])
        self.version = packed.version

    def _fault(self, when: str) -> None:
        for what in ("die", "hang", "raise"):
            order = Path(self.folder) / f"{what} in {when}"
            try:
                order.unlink()
            except FileNotFoundError:
                continue
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "hang":
                time.sleep(60)
            else:
                raise ZeroDivisionError("ordered")

    def _sample(self, request: Request, j: int) -> Sample:
        return Sample(
            id=sample_id(request, j),
            group=request.group,
            index=j,
            prompt_ids=request.prompt_ids,
            completion_ids=[request.seed[-1], j, self.weight],
            finish="length",
            logp_rollout=np.zeros(3, np.float32),
            version=self.version,
            meta={"calls": list(self.calls), "pid": os.getpid()},
        )
