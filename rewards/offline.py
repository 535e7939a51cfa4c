"""Labelled trajectories from files, ready for an estimator: read, labelled if need be, checked against a run.

A file of ours brings its labels; DSRL's bring true costs, which the oracle turns into labels. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from envs.errors import UserError
from rewards.labels import LabelOracle, prefix_ends
from rollouts.recorded import (
    CostedTrajectory,
    LabeledTrajectory,
    is_hdf5,
    read_dsrl,
    read_recording,
)


def label_costed(
    trajectory: CostedTrajectory, slice_steps: int, oracle: LabelOracle, rng: np.random.Generator
) -> LabeledTrajectory:
    """The trajectory with the oracle's labels in place of its costs: every `slice_steps` and the whole."""
    ends = prefix_ends(len(trajectory.costs), slice_steps)
    return LabeledTrajectory(
        obs=trajectory.obs,
        actions=trajectory.actions,
        rewards=trajectory.rewards,
        terminated=trajectory.terminated,
        ends=ends,
        labels=oracle.label(trajectory.costs, ends, trajectory.terminated, rng),
    )


def load_offline(
    path: str | Path, slice_steps: int, oracle: LabelOracle, rng: np.random.Generator
) -> list[LabeledTrajectory]:
    """The trajectories of a recording of ours, or of a DSRL file labelled by `oracle`. Raises UserError."""
    if not Path(path).is_file():
        raise UserError("there is no such file of offline trajectories", given=f"algo.offline={path}")
    if is_hdf5(path):
        return [label_costed(t, slice_steps, oracle, rng) for t in read_dsrl(path)]
    return read_recording(path).trajectories


def check_offline(
    trajectories: Sequence[LabeledTrajectory],
    *,
    path: str,
    obs_dim: int,
    action_dim: int,
    horizon: int,
    slice_steps: int,
) -> None:
    """Raise UserError when the trajectories are not of the run's environment, or teach nothing.

    Sizes; lengths against the horizon and the prefix slice (an episode that the environment ended early may
    be shorter than the slice); labels of the wholes that all say the same.
    """
    sizes = trajectories[0].obs.shape[1], trajectories[0].actions.shape[1]
    if sizes != (obs_dim, action_dim):
        raise UserError(
            "the offline trajectories are of another environment",
            given=f"{path}: observations of {sizes[0]}, actions of {sizes[1]} numbers",
            allowed=f"observations of {obs_dim}, actions of {action_dim}, as in this environment",
            fix="choose the environment they were recorded in, with env.id",
        )
    for number, t in enumerate(trajectories):
        if len(t.obs) > horizon:
            raise UserError(
                f"offline trajectory {number} is longer than an episode of this run",
                given=f"{path}: {len(t.obs)} steps, env.horizon={horizon}",
                fix=f"set env.horizon={max(len(x.obs) for x in trajectories)}, or record with this horizon",
            )
        if len(t.obs) < slice_steps and not t.terminated:
            raise UserError(
                f"offline trajectory {number} is shorter than the prefix slice",
                given=f"{path}: {len(t.obs)} steps, algo.slice_steps={slice_steps}",
                fix=f"set algo.slice_steps={min(len(x.obs) for x in trajectories)} or less",
            )
    whole = {float(t.labels[-1]) for t in trajectories}
    if len(whole) < 2:
        raise UserError(
            f"the offline labels are of one class: all {len(trajectories)} trajectories are "
            f"{'safe' if whole == {1.0} else 'unsafe'}, so they say nothing about where the limit lies",
            given=path,
            fix="add trajectories of the other kind (launch/record.py with append=true), "
            "or leave algo.offline out",
        )
