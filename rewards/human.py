"""A person as the annotator: the run shows clips, waits, and turns the answers into labels.

Questions and answers lie in the run's folder (rewards.label_queue); a web page (rewards.label_server) or a
terminal (rewards.label_terminal) shows them. A safe episode makes all its prefixes safe. An unsafe one labels
its prefixes when the moment of the violation was marked, else the whole alone.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from envs.make import EnvConfig
from rewards.label_queue import Answer, LabelQueue, clip_id
from rewards.labels import Judgement, prefix_ends
from rollouts.clips import ClipRendering, write_request
from rollouts.collect import Interrupted
from rollouts.replay import frame_steps

POLL_S = 0.2


@dataclass(kw_only=True)
class HumanConfig:
    """How a person is asked. `host` other than this machine's own needs the token that the run prints."""

    host: str = "127.0.0.1"
    port: int = 8765  # 0: any free one
    frames: int = 60  # of a clip, about
    undo_s: float = 3.0  # the last answer of a batch can be taken back for so long
    timeout_s: float = 86_400.0  # without any answer, then the run ends; answers are kept

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        if not 0 <= self.port <= 65_535:
            raise UserError("algo.human.port is no port", given=self.port, allowed="0 to 65535")
        if not 2 <= self.frames <= 1000:
            raise UserError("algo.human.frames is out of range", given=self.frames, allowed="2 to 1000")
        for name in ("undo_s", "timeout_s"):
            if not getattr(self, name) >= 0:
                raise UserError(
                    f"algo.human.{name} is no time", given=getattr(self, name), allowed="[0, inf)"
                )


def judgement(answer: Answer, length: int, slice_steps: int, frames: int) -> Judgement | None:
    """Prefix ends and labels of an episode of `length` steps; None when it was skipped.

    A violation marked at a frame happened after the frame before it: prefixes that end at or before that one
    are safe, those that end at or after the marked one unsafe, and those between the two are left out.
    """
    if answer.label == "skip":
        return None
    ends = prefix_ends(length, slice_steps)
    if answer.label == "safe":
        return ends, np.ones(len(ends), np.float32)
    if answer.step is None:
        return ends[-1:], np.zeros(1, np.float32)
    steps = frame_steps(length, frames)
    before = steps[steps < answer.step].max(initial=0)
    ends = ends[(ends <= before) | (ends >= answer.step)]
    return ends, (ends < answer.step).astype(np.float32)


class HumanAnnotator:
    """Asks a person about episodes and waits; see `rewards.labels.Annotator`."""

    def __init__(
        self,
        folder: Path,
        env: EnvConfig,
        obs_dim: int,
        slice_steps: int,
        config: HumanConfig,
        say: Callable[[str], None],
        should_stop: Callable[[], Any],
        where: str,
    ) -> None:
        self.queue = LabelQueue(folder)
        self.obs_dim, self.slice_steps, self.config = obs_dim, slice_steps, config
        self.say, self.should_stop, self.where = say, should_stop, where
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "env.json").write_text(json.dumps(dataclasses.asdict(env)) + "\n")

    def label(self, episodes: Sequence[Any], rng: np.random.Generator) -> list[Judgement | None]:
        """Ask about the episodes that nobody has answered yet; every answer, None for the skipped ones.

        Raises Interrupted when the run is asked to stop, and UserError when no clip can be drawn or no answer
        comes for `timeout_s`.
        """
        ids = [clip_id(e.inputs) for e in episodes]
        known = self.queue.answers()
        if any(clip not in known for clip in ids):
            # A run that was killed while it waited shows its whole batch again: answers can still be undone.
            asked = set(self.queue.batch()) | (set(ids) - known.keys())
            self._ask({clip: e for clip, e in zip(ids, episodes, strict=True) if clip in asked})
            known = self.queue.answers()
        elif self.queue.batch():  # answered while the run was away
            self.queue.close()
        return [
            judgement(known[clip], len(e.inputs), self.slice_steps, self.config.frames)
            for clip, e in zip(ids, episodes, strict=True)
        ]

    def _ask(self, asked: dict[str, Any]) -> None:
        for clip, e in asked.items():
            obs = e.inputs[:, : self.obs_dim]
            write_request(self.queue.folder, clip, e.replay, obs, self.config.frames)
        self.queue.ask(list(asked))
        rendering = ClipRendering(self.queue.folder, list(asked))
        try:
            self._wait(list(asked), rendering)
        finally:
            rendering.stop()
        self.queue.close()

    def _wait(self, clips: list[str], rendering: ClipRendering) -> None:
        total, told, since = len(clips), -1, time.monotonic()
        while True:
            known = self.queue.answers()
            answered = [known[clip].time for clip in clips if clip in known]
            if len(answered) == total and time.time() - max(answered, default=0.0) >= self.config.undo_s:
                return
            if self.should_stop():
                raise Interrupted
            if (problem := rendering.problem()) is not None:
                raise UserError(
                    "the clips that a person shall label cannot be drawn",
                    given=problem,
                    fix="see the README on rendering; answers so far are kept",
                )
            if len(answered) != told and (told < 0 or len(answered) == total or len(answered) % 5 == 0):
                self.say(f"waiting for a person: {len(answered)} of {total} clips labelled, at {self.where}")
            if len(answered) != told:
                told, since = len(answered), time.monotonic()
            if time.monotonic() - since > self.config.timeout_s:
                raise UserError(
                    f"the run waited {self.config.timeout_s:g} s for a person's next label",
                    given=f"{total - len(answered)} of {total} clips are not labelled",
                    fix=f"label at {self.where}, then resume the run: answers are kept; or raise "
                    "algo.human.timeout_s",
                )
            time.sleep(POLL_S)
