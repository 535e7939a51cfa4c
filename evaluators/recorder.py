"""Labelled trajectories from a run's checkpoint: its policy plays, the simulated annotator labels.

What is written holds labels only; the true costs that the annotator looked at stay here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from rewards.labels import LabelOracle
from rewards.offline import label_costed
from rollouts.recorded import CostedTrajectory, LabeledTrajectory, Recording, read_recording, write_recording
from trainers.config import engine_of, typed
from trainers.run import Run

LABEL_STREAM = 7  # first word of the seed sequence of label noise, beside the engine's and the algorithms'


def record_run(
    run_path: str | Path,
    out: str | Path,
    *,
    oracle: LabelOracle,
    episodes: int,
    slice_steps: int,
    seed: int = 0,
    deterministic: bool = False,
    append: bool = False,
) -> list[LabeledTrajectory]:
    """Play whole episodes with the run's newest checkpoint, label them and write them to `out`.

    append adds to the trajectories that `out` holds already. Returns those that were added. Raises UserError
    without a usable checkpoint, for a file that is there and for one of another environment.
    """
    out = Path(out)
    if out.exists() and not append:
        raise UserError("the file exists already", given=str(out), fix="append=true, or another out=<file>")
    if episodes < 1:
        raise UserError("a recording needs episodes", given=f"episodes={episodes}", allowed=">= 1")
    run = Run.open(run_path)
    saved = run.latest()
    if saved is None:
        raise UserError(f"run {run.name!r} has no checkpoint yet", given=str(run.path / "checkpoints"))
    cfg: Any = typed(run.config)
    if not 1 <= slice_steps <= cfg.env.horizon:
        raise UserError(
            "the prefix slice must fit into an episode",
            given=f"slice_steps={slice_steps}, the run's env.horizon={cfg.env.horizon}",
            allowed=f"1 to {cfg.env.horizon}",
        )
    before = read_recording(out).trajectories if out.exists() else []
    played = engine_of(cfg.algorithm).play(
        cfg, saved[1], episodes=episodes, deterministic=deterministic, seed=seed
    )
    rng = np.random.default_rng((LABEL_STREAM, seed, len(before)))
    added = [label_costed(CostedTrajectory(**episode), slice_steps, oracle, rng) for episode in played]
    write_recording(out, Recording(env_id=cfg.env.id, trajectories=before + added))
    return added
