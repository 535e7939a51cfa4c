"""Engines and algorithms that die, wait or take notes, named in a run's config as a user would name his."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from algos.grpo import GRPO
from rollouts.engine_transformers import TransformersEngine

NOTES = "SEEDBED_TEST_NOTES"  # the folder for notes of the driver; engines are given theirs as an option


def note(folder: str, **what: Any) -> None:
    """One line about this moment."""
    with (Path(folder) / "notes.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.monotonic(), "pid": os.getpid(), **what}) + "\n")


def notes(folder: Path) -> list[dict[str, Any]]:
    """What was noted."""
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def die() -> None:
    """As if the machine's memory had run out."""
    os.kill(os.getpid(), signal.SIGKILL)


class Engine(TransformersEngine):
    """An engine with a folder for notes (`rollout.options.folder`)."""

    def __init__(self, *args: Any, folder: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folder = folder

    def die_once(self) -> None:
        """Die, unless an engine of this run has done so."""
        try:
            (Path(self.folder) / "died").touch(exist_ok=False)
        except FileExistsError:
            return
        die()


class NotingEngine(Engine):
    """Notes when it draws and with which weights; each drawing lasts a little."""

    def generate(self, requests: Any) -> Any:
        note(self.folder, what="draw", batch=requests[0].seed[1], version=self.version)
        time.sleep(0.3)
        return super().generate(requests)


class DiesDrawing(Engine):
    """Dies in its third batch, half of it drawn."""

    def generate(self, requests: Any) -> Any:
        if requests[0].seed[1] == 2:
            super().generate(requests[:1])
            self.die_once()
        return super().generate(requests)


class DiesLoading(Engine):
    """Dies when it takes over the weights of step 2, in place already."""

    def load_weights(self, packed: Any) -> None:
        super().load_weights(packed)
        if packed.version == (0, 2):
            self.die_once()


class NotesUpdates(TrainerCallback):
    """Notes the moment before every update."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(os.environ[NOTES], what="update", step=state.global_step)


class WaitsForDraw(TrainerCallback):
    """Holds every update, for at most a minute, until the drawing of the next batch has begun."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder, step = os.environ[NOTES], state.global_step
        limit = time.monotonic() + 60
        while step + 1 < state.max_steps and time.monotonic() < limit:
            if any(n["what"] == "draw" and n["batch"] == step + 1 for n in notes(Path(folder))):
                break
            time.sleep(0.02)
        note(folder, what="update", step=step)


class FeedDies(GRPO):
    """Its credit ends the process of the Feed at the third batch."""

    def credit(self, groups: Any, advantages: Any) -> Any:  # type: ignore[override]
        import numpy as np

        if groups[0][0].group >= 2 * len(groups):
            die()
        flat = advantages.reshape(-1)
        samples = [s for group in groups for s in group]
        return [np.full(len(s.completion_ids), a, np.float32) for s, a in zip(samples, flat, strict=True)]


class LearnerDies(GRPO):
    """The last learner's process ends after its fourth update, in the first attempt."""

    def after_step(self, learner: Any, step: int) -> dict[str, Any]:  # type: ignore[override]
        place = learner.context
        if step == 4 and place.attempt == 0 and place.rank == place.world_size - 1:
            die()
        return {}
