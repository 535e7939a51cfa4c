"""The queue of clips and its answers: nothing is lost, nothing is asked twice."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from envs.errors import UserError
from rewards.human import HumanConfig, judgement
from rewards.label_queue import Answer, LabelQueue, clip_id

A, B, C = ("a" * 20, "b" * 20, "c" * 20)


def queue(folder: Path, *clips: str, steps: list[int] | None = None) -> LabelQueue:
    """A queue that waits for clips; with `steps`, all of them are drawn."""
    q = LabelQueue(folder)
    q.ask(clips)
    for clip in clips if steps else ():
        place = folder / "clips" / clip
        place.mkdir(parents=True)
        (place / "clip.json").write_text(json.dumps({"steps": steps}))
    return q


def test_the_id_is_the_episode_s() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert clip_id(x) == clip_id(x.copy())
    assert len({clip_id(x), clip_id(x + 1), clip_id(x.reshape(3, 4)), clip_id(x[:3])}) == 4


def test_answers_survive_and_the_last_one_counts(tmp_path: Path) -> None:
    q = queue(tmp_path, A, B, C, steps=[0, 5, 10])
    q.answer(A, "safe")
    q.answer(B, "unsafe", 5)
    again = LabelQueue(tmp_path)
    assert again.pending() == [C]
    assert (again.answers()[B].label, again.answers()[B].step) == ("unsafe", 5)
    again.answer(A, "unsafe")
    assert q.answers()[A].label == "unsafe"


def test_undo_takes_back_one_answer_after_the_other(tmp_path: Path) -> None:
    q = queue(tmp_path, A, B, C)
    assert q.undo() is None
    q.answer(A, "safe")
    q.answer(C, "skip")
    assert q.last() == C
    assert q.undo() == C
    assert q.pending() == [B, C]
    assert q.undo() == A
    assert q.pending() == [A, B, C]
    assert q.undo() is None


def test_what_the_run_has_taken_can_neither_be_undone_nor_answered(tmp_path: Path) -> None:
    q = queue(tmp_path, A, steps=[0, 1])
    q.answer(A, "safe")
    q.close()
    assert q.batch() == []
    assert not (tmp_path / "clips" / A).exists()
    assert q.undo() is None
    with pytest.raises(UserError, match="not waited for any more"):
        q.answer(A, "unsafe")
    assert q.answers()[A].label == "safe"  # and it is not asked again


def test_a_torn_line_loses_itself_alone(tmp_path: Path) -> None:
    q = queue(tmp_path, A, B)
    q.answer(A, "safe")
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"clip": "' + B)
    q.answer(B, "skip")
    assert {clip: a.label for clip, a in q.answers().items()} == {A: "safe", B: "skip"}


def test_many_labellers_at_once(tmp_path: Path) -> None:
    clips = [f"{i:020x}" for i in range(40)]
    q = queue(tmp_path, *clips)

    def work(mine: list[str]) -> None:
        own = LabelQueue(tmp_path)
        for clip in mine:
            own.answer(clip, "safe")

    threads = [threading.Thread(target=work, args=(clips[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert q.pending() == []
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 40


@pytest.mark.parametrize("step", [3, -1, 11, True, "5", 5.5])
def test_a_moment_that_the_clip_does_not_show(tmp_path: Path, step: object) -> None:
    q = queue(tmp_path, A, steps=[0, 5, 10])
    with pytest.raises(UserError, match="the moment of a violation is a step that the clip shows"):
        q.answer(A, "unsafe", step)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="of an unsafe one"):
        q.answer(A, "safe", 5)
    with pytest.raises(UserError, match="unknown label"):
        q.answer(A, "perhaps")
    assert q.pending() == [A]


# -- from an answer to labels: 30 steps, prefixes every 4, frames after 0, 6, 12, 18, 24 and 30 steps


def labels(label: str, step: int | None = None) -> tuple[list[int], list[float]] | None:
    found = judgement(Answer(label, step, 0.0), 30, 4, 5)
    return None if found is None else (found[0].tolist(), found[1].tolist())


def test_judgements_by_hand() -> None:
    every = [4, 8, 12, 16, 20, 24, 28, 30]
    assert labels("skip") is None
    assert labels("safe") == (every, [1.0] * 8)
    assert labels("unsafe") == ([30], [0.0])
    # Seen at 18, not yet at 12: what ends at 16 may be either.
    assert labels("unsafe", 18) == ([4, 8, 12, 20, 24, 28, 30], [1, 1, 1, 0, 0, 0, 0])
    assert labels("unsafe", 6) == ([8, 12, 16, 20, 24, 28, 30], [0.0] * 7)
    assert labels("unsafe", 0) == (every, [0.0] * 8)
    assert labels("unsafe", 30) == ([4, 8, 12, 16, 20, 24, 30], [1, 1, 1, 1, 1, 1, 0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "is no port"),
        ({"frames": 1}, "out of range"),
        ({"undo_s": -1.0}, "undo_s is no time"),
    ],
)
def test_settings_that_cannot_work(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HumanConfig(**settings).check()
