"""Labelling in a terminal: the clips of a label queue as coloured blocks, the answers by key.

Works over any connection that shows 24-bit colours. The queue is the same as the page's; both may be open.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from envs.errors import UserError
from rewards.label_queue import LabelQueue
from rollouts.clips import clip_steps

FRAME_S = 0.1
HELP = "s safe   u unsafe   k skip   z undo   m mark the moment   space pause   , . one frame   q quit"
ANSWERS = {"s": "safe", "u": "unsafe", "k": "skip"}


def blocks(picture: np.ndarray) -> str:
    """Pixels (2 rows, columns, 3) uint8 as lines of half blocks: upper pixel in front, lower behind."""
    lines = []
    for upper, lower in zip(picture[::2], picture[1::2], strict=True):
        cells = [
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀"
            for a, b in zip(upper.tolist(), lower.tolist(), strict=True)
        ]
        lines.append("".join(cells) + "\x1b[0m")
    return "\r\n".join(lines)


def load_frames(place: Path, count: int, columns: int, rows: int) -> list[np.ndarray]:
    """The clip's pictures, shrunk to fit `columns` by `rows` cells of one column and two rows of pixels."""
    from PIL import Image

    found = []
    for number in range(count):
        with Image.open(place / f"{number:05d}.jpg") as image:
            scale = min(columns / image.width, 2 * rows / image.height)
            width = max(1, int(image.width * scale))
            height = max(2, int(image.height * scale) // 2 * 2)
            found.append(np.asarray(image.convert("RGB").resize((width, height))))
    return found


def label_in_terminal(queue: LabelQueue) -> int:
    """Show clip after clip until the labeller quits; how many answers were given. Raises UserError."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("labelling in a terminal needs one", fix="page=true serves the page instead")
    given = 0
    with _raw_keys():
        while True:
            clip = next((c for c in queue.pending() if clip_steps(queue.folder, c) is not None), None)
            if clip is None:
                waiting = "the clips are being drawn" if queue.pending() else "nothing to label now"
                _print(f"\x1b[2J\x1b[H{waiting}; q quits, z takes the last answer back\r\n")
                key = _key(0.5)
                if key == "q":
                    return given
                if key == "z" and queue.undo():
                    given -= 1
                continue
            key, step = _show(queue, clip)
            if key == "q":
                return given
            with contextlib.suppress(UserError):  # somebody else was faster, or the run has gone on
                if key == "z":
                    given -= queue.undo() is not None
                elif key in ANSWERS:
                    queue.answer(clip, ANSWERS[key], step if key == "u" else None)
                    given += 1


def _show(queue: LabelQueue, clip: str) -> tuple[str, int | None]:
    """Play one clip until a key ends it; (key, marked step)."""
    steps = clip_steps(queue.folder, clip)
    assert steps is not None
    size = shutil.get_terminal_size()
    try:
        frames = load_frames(queue.folder / "clips" / clip, len(steps), size.columns - 1, size.lines - 4)
    except OSError:  # answered elsewhere, and gone
        return "", None
    at, playing, mark = 0, True, None
    _print("\x1b[2J")
    while True:
        marked = "" if mark is None else f"   unsafe at step {steps[mark]}"
        left = len(queue.pending())
        _print(
            f"\x1b[H{blocks(frames[at])}\r\nstep {steps[at]} of {steps[-1]}{marked}   {left} left\x1b[K\r\n"
            f"{HELP}\x1b[K\r\n"
        )
        key = _key(FRAME_S)
        if key in (*ANSWERS, "z", "q"):
            return key, None if mark is None else steps[mark]
        if key == "m":
            mark, playing = (None if mark == at else at), False
        elif key == " ":
            playing = not playing
        elif key in (",", "."):
            playing, at = False, min(len(frames) - 1, max(0, at + (1 if key == "." else -1)))
        elif playing:
            at = (at + 1) % len(frames)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _key(seconds: float) -> str:
    """The next key, in lower case; empty if none is pressed for so long."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="ignore").lower() if ready else ""


@contextlib.contextmanager
def _raw_keys() -> Iterator[None]:
    """Keys arrive at once and are not echoed; the other screen is used, and left again."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    _print("\x1b[?1049h\x1b[?25l")
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        _print("\x1b[?25h\x1b[?1049l")
