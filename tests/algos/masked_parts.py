"""Rewards and engines for runs of masked models, named in a config as a user would name his."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rollouts.masked_diffusion import MaskedDiffusionEngine


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Share of tokens with an even id: what a model of random weights can earn at once."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


class DiesDrawing(MaskedDiffusionEngine):
    """Dies once, in its third batch, half of it drawn; `folder` keeps note of it."""

    def __init__(self, *args: Any, folder: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folder = folder

    def generate(self, requests: Any) -> Any:
        died = Path(self.folder) / "died"
        if requests[0].seed[1] == 2 and not died.exists():
            super().generate(requests[:1])
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(requests)
