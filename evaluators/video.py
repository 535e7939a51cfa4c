"""One episode of a run as video.mp4, rendered without a screen in a child process.

    python -m evaluators.video RUN_DIR SEED OUT.mp4

is that child: MUJOCO_GL says how it draws and has to be set before MuJoCo is imported. `Rendering` starts it
and, where one way to draw does not work, tries the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from envs import headless

CHECKOUT = Path(__file__).resolve().parent.parent
MAX_FRAMES, FRAMES_PER_SECOND = 125, 20
WIDTH, HEIGHT = 480, 368  # multiples of 16, as video codecs like them
TIMEOUT_S = 300.0
MARK = "seedbed-video: "  # begins the line on which the child says what went wrong


class Rendering:
    """A child that writes RUN/video.mp4. `wait` returns None, or what stood in the way; it never raises."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.run_dir, self.seed = Path(run_dir).resolve(), seed
        self.backends = headless.backends()
        self.aside = self.run_dir / ".tmp-video.mp4"
        self._start(self.backends[0])

    def _start(self, backend: str) -> None:
        places = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**headless.variables(backend), "PYTHONPATH": os.pathsep.join(places)}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "evaluators.video", str(self.run_dir), str(self.seed), str(self.aside)],
            env=os.environ | variables,
            cwd=CHECKOUT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> str | None:
        """Wait for the video, at most five minutes a backend; the file appears whole or not at all."""
        problems = []
        for i, backend in enumerate(self.backends):
            if i > 0:
                self._start(backend)
            problem = self._finish()
            if problem is None:
                return None
            problems.append(f"MUJOCO_GL={backend}: {problem}")
        return "; ".join([*problems, headless.DEBIAN])

    def _finish(self) -> str | None:
        try:
            _, errors = self.child.communicate(timeout=TIMEOUT_S)
            if self.child.returncode == 0:
                self.aside.replace(self.run_dir / "video.mp4")
                return None
        except subprocess.TimeoutExpired:
            self.stop()
            return f"not ready after {TIMEOUT_S:.0f} s"
        except OSError as error:
            return str(error)
        # The line that names the exception; after it a renderer may still complain about its own end.
        named = [line for line in errors.splitlines() if line.startswith(MARK)]
        return named[-1].removeprefix(MARK) if named else f"exit code {self.child.returncode}"

    def stop(self) -> None:
        """End the child if it still runs and remove what it left half done."""
        if self.child.poll() is None:
            self.child.kill()
            self.child.communicate()
        self.aside.unlink(missing_ok=True)


def annotate(frames: np.ndarray, trace: dict[str, np.ndarray], budget: float) -> np.ndarray:
    """Step, return and cost so far written into frames (F, H, W, 3); red once the budget is exceeded."""
    from PIL import Image, ImageDraw

    returns, costs = (np.concatenate([[0.0], np.cumsum(trace[name])]) for name in ("reward", "cost"))
    shown = []
    for frame, step in zip(frames, trace["frame_step"]):
        image = Image.fromarray(frame)
        draw = ImageDraw.Draw(image)
        over = costs[step] > budget
        draw.rectangle((0, 0, image.width, 22), fill=(150, 20, 20) if over else (30, 30, 30))
        text = f"step {step}    return {returns[step]:.0f}    cost {costs[step]:.0f} / budget {budget:g}"
        draw.text((8, 5), text, fill=(255, 255, 255))
        shown.append(np.asarray(image))
    return np.stack(shown)


def render(run_dir: Path, seed: int, out: Path) -> None:
    """Play one stochastic episode of the run's newest checkpoint and write it to `out`."""
    import imageio

    from trainers.config import engine_of, typed
    from trainers.run import Run

    run = Run.open(run_dir)
    saved = run.latest()
    if saved is None:
        raise FileNotFoundError(f"no checkpoint in {run_dir}")
    cfg: Any = typed(run.config)
    frames, trace = engine_of(cfg.algorithm).render_episode(
        cfg, saved[1], seed=seed, deterministic=False, max_frames=MAX_FRAMES, width=WIDTH, height=HEIGHT
    )
    imageio.mimwrite(out, list(annotate(frames, trace, cfg.algo.budget)), fps=FRAMES_PER_SECOND)


if __name__ == "__main__":
    try:
        render(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    except Exception as error:
        print(f"{MARK}{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        raise
    # Skips the interpreter's tear-down, in which EGL raises after its own end.
    os._exit(0)
