"""Clips for people to judge: requests in a folder become JPEG frames, drawn headless in a child process.

    python -m rollouts.clips FOLDER ID ...

is that child. FOLDER/env.json says which environment; FOLDER/clips/<id>/ holds `replay.safetensors`, and gets
`00000.jpg` and so on and, when all of them are there, `clip.json` with the steps they follow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs import headless
from envs.make import EnvConfig, make_env
from rollouts.replay import Replay, replay_frames

CHECKOUT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT, QUALITY = 400, 300, 85
MARK = "seedbed-clips: "  # begins the line on which the child says what went wrong


def write_request(folder: Path, clip: str, replay: Replay, obs: np.ndarray, frames: int) -> None:
    """Ask for the clip `clip` of the episode with observations `obs` (L, S)."""
    from safetensors.numpy import save_file

    place = folder / "clips" / clip
    place.mkdir(parents=True, exist_ok=True)
    arrays = {"actions": np.ascontiguousarray(replay.actions), "obs": np.ascontiguousarray(obs)}
    about = {"seed": str(replay.seed), "start": str(replay.start), "frames": str(frames)}
    aside = place / f".tmp-{os.getpid()}"
    save_file(arrays, aside, metadata=about)
    aside.replace(place / "replay.safetensors")


def clip_steps(folder: Path, clip: str) -> list[int] | None:
    """The steps that the clip's frames follow; None while it is not drawn."""
    try:
        return json.loads((folder / "clips" / clip / "clip.json").read_text())["steps"]
    except (OSError, ValueError, KeyError):
        return None


def render_clips(folder: Path, clips: Sequence[str]) -> None:
    """Draw those of the requested clips that are not drawn yet."""
    from PIL import Image
    from safetensors import safe_open

    env: Any = None
    for clip in clips:
        place = folder / "clips" / clip
        if clip_steps(folder, clip) is not None:
            continue
        if env is None:
            env = make_env(
                EnvConfig(**json.loads((folder / "env.json").read_text())), render_mode="rgb_array"
            )
        with safe_open(place / "replay.safetensors", framework="numpy") as file:
            about, obs, actions = file.metadata(), file.get_tensor("obs"), file.get_tensor("actions")
        replay = Replay(seed=int(about["seed"]), start=int(about["start"]), actions=actions)
        frames, steps = replay_frames(env, replay, obs, int(about["frames"]))
        for number, frame in enumerate(frames):
            picture = Image.fromarray(frame)
            picture.thumbnail((WIDTH, HEIGHT))
            picture.save(place / f"{number:05d}.jpg", quality=QUALITY)
        aside = place / ".tmp-clip.json"
        aside.write_text(json.dumps({"steps": steps.tolist()}))
        aside.replace(place / "clip.json")
    if env is not None:
        env.close()


class ClipRendering:
    """A child that draws clips; where one way to draw does not work, the next is tried. Never raises."""

    def __init__(self, folder: Path, clips: Sequence[str]) -> None:
        self.folder, self.clips = Path(folder).resolve(), list(clips)
        self.left = headless.backends()
        self.problems: list[str] = []
        self._start()

    def _start(self) -> None:
        self.backend = self.left.pop(0)
        places = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**headless.variables(self.backend), "PYTHONPATH": os.pathsep.join(places)}
        self.errors = (self.folder / "rendering.log").open("w+")
        self.child = subprocess.Popen(
            [sys.executable, "-m", "rollouts.clips", str(self.folder), *self.clips],
            env=os.environ | variables,
            cwd=CHECKOUT,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is for the run, which ends this child itself
        )

    def problem(self) -> str | None:
        """What stands in the way, once every way to draw has failed; None while it works or is done."""
        if self.child.poll() in (None, 0):
            return None
        self.errors.seek(0)
        named = [line for line in self.errors.read().splitlines() if line.startswith(MARK)]
        self.errors.close()
        what = named[-1].removeprefix(MARK) if named else f"exit code {self.child.returncode}"
        self.problems.append(f"MUJOCO_GL={self.backend}: {what}")
        if self.left:
            self._start()
            return None
        return "; ".join([*self.problems, headless.DEBIAN])

    def done(self) -> bool:
        """Whether the child has drawn everything."""
        return self.child.poll() == 0

    def stop(self) -> None:
        """End the child if it still runs."""
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self.errors.close()


if __name__ == "__main__":
    try:
        render_clips(Path(sys.argv[1]), sys.argv[2:])
    except Exception as error:
        print(f"{MARK}{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    # Skips the interpreter's tear-down, in which EGL raises after its own end.
    os._exit(0)
