"""What people are asked and what they answered, in a folder: it outlives the run, the page and the browser.

    batch.json   the clips that the run waits for     answers.jsonl   one answer a line, only ever added to
    env.json     the environment that draws them      clips/<id>/     see rollouts.clips

A clip's id is a hash of the episode itself. A run that is taken up again comes to the same episodes and finds
their answers: nobody is asked twice. Several labellers may answer at once; the last answer to a clip counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from envs.errors import UserError
from rollouts.clips import clip_steps

LABELS = ("safe", "unsafe", "skip")
CLIP_ID = re.compile(r"[0-9a-f]{20}")


@dataclass(frozen=True)
class Answer:
    """What a labeller said of a clip. `step`: after which the violation was seen, if that was marked."""

    label: str
    step: int | None
    time: float  # seconds since the epoch


def clip_id(inputs: np.ndarray) -> str:
    """The id of an episode: a hash of its observations and actions (L, S + A)."""
    digest = hashlib.sha256(repr(inputs.shape).encode())
    digest.update(np.ascontiguousarray(inputs, np.float32).tobytes())
    return digest.hexdigest()[:20]


class LabelQueue:
    """The folder. Any process may read it and answer; only the run asks."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._answers = self.folder / "answers.jsonl"

    # --- the run

    def ask(self, clips: Sequence[str]) -> None:
        """Make `clips` the ones that are waited for."""
        self._write_batch(list(clips))

    def close(self) -> None:
        """Nothing is waited for any more; the pictures of the answered clips are removed."""
        batch = self.batch()
        self._write_batch([])
        for clip in batch:
            shutil.rmtree(self.folder / "clips" / clip, ignore_errors=True)

    def _write_batch(self, clips: list[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".tmp-batch-{os.getpid()}"
        aside.write_text(json.dumps({"clips": clips}) + "\n")
        aside.replace(self.folder / "batch.json")

    # --- everybody

    def batch(self) -> list[str]:
        """The clips that are waited for, answered or not."""
        try:
            clips = json.loads((self.folder / "batch.json").read_text())["clips"]
        except (OSError, ValueError, KeyError):
            return []
        return [clip for clip in clips if CLIP_ID.fullmatch(clip)]

    def answers(self) -> dict[str, Answer]:
        """The answer that counts of every clip ever answered, in the order in which they were given."""
        found: dict[str, Answer] = {}
        try:
            lines = self._answers.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                row = json.loads(line)
                clip, label = row["clip"], row["label"]
                found.pop(clip, None)
                if label in LABELS:
                    found[clip] = Answer(label, row.get("step"), float(row["time"]))
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill while it was written
        return found

    def pending(self) -> list[str]:
        """The clips that are waited for and not answered."""
        known = self.answers()
        return [clip for clip in self.batch() if clip not in known]

    def answer(self, clip: str, label: str, step: int | None = None) -> None:
        """Add an answer. Raises UserError for a clip that is not waited for or a step it does not show."""
        if clip not in self.batch():
            raise UserError("this clip is not waited for any more", given=clip)
        if label not in LABELS:
            raise UserError("unknown label", given=label, allowed=LABELS)
        if step is not None:
            steps = clip_steps(self.folder, clip) or []
            if label != "unsafe" or isinstance(step, bool) or step not in steps:
                raise UserError(
                    "the moment of a violation is a step that the clip shows, of an unsafe one",
                    given=f"{label}, step {step}",
                    allowed=f"one of {len(steps)} steps",
                )
        self._append({"clip": clip, "label": label, "step": step})

    def last(self) -> str | None:
        """The clip answered last among those waited for: what `undo` would take back."""
        batch = set(self.batch())
        given = [clip for clip in self.answers() if clip in batch]
        return given[-1] if given else None

    def undo(self) -> str | None:
        """Take the last answer back; the clip it was about, or None when there is none to take back."""
        clip = self.last()
        if clip is not None:
            self._append({"clip": clip, "label": "undo", "step": None})
        return clip

    def _append(self, row: dict) -> None:
        """One whole line on disk, whoever else is writing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({**row, "time": time.time()}) + "\n"
        with self._answers.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
