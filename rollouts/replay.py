"""An episode played again from its reset seed and its actions, to be drawn. No learning code, no Ray.

A rollout starts from a seeded reset (rollouts.collect); what an environment does after it follows from the
seed and the executed actions. Every observation of the replay is compared with the recorded one, so that what
is shown is what happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.errors import UserError
from rollouts.collect import ROLLOUT_STREAM
from rollouts.trajectories import Episode, Rollout


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How to play an episode again: a reset with `seed`, then `actions`; the episode begins at `start`."""

    seed: int
    start: int  # steps of earlier episodes in the same window
    actions: np.ndarray  # (start + L, A) float32, as executed


def window_seed(seed: int, iteration: int, env: int) -> int:
    """The seed of the reset with which `rollouts.collect.collect` begins an environment's window."""
    return int(np.random.default_rng((ROLLOUT_STREAM, seed, iteration, env)).integers(2**31))


def replay_of(rollout: Rollout, episode: Episode, seed: int, iteration: int) -> Replay:
    """The replay of an episode of the iteration's joined rollout; `seed` is the run's."""
    return Replay(
        seed=window_seed(seed, iteration, episode.env),
        start=episode.start,
        actions=rollout.executed[: episode.end, episode.env].copy(),
    )


def frame_steps(length: int, frames: int) -> np.ndarray:
    """The steps, 0 to `length`, after which about `frames` pictures are taken: evenly, the last always."""
    every = max(1, -(-length // frames))
    steps = np.arange(0, length + 1, every)
    return steps if steps[-1] == length else np.append(steps, length)


def replay_frames(
    env: Any, replay: Replay, obs: np.ndarray, frames: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Pictures (H, W, 3) of the episode with observations `obs` (L, S), and the steps they follow.

    Raises UserError when the replay's observations differ from these, or the environment shows no picture.
    """
    length = len(replay.actions) - replay.start
    steps = frame_steps(length, frames)
    shown, wanted = [], set(steps.tolist())
    now = env.reset(seed=replay.seed)[0]
    for t, action in enumerate(replay.actions):
        step = t - replay.start
        if step >= 0:
            _compare(now, obs[step], step)
        if step == 0:
            shown.append(_picture(env))
        now, _, terminated, truncated, _ = env.step(action.copy())
        if step + 1 in wanted and step >= 0:
            shown.append(_picture(env))
        if (terminated or truncated) and t + 1 < len(replay.actions):
            now = env.reset()[0]
    return shown, steps


def _compare(now: np.ndarray, recorded: np.ndarray, step: int) -> None:
    if not np.allclose(np.asarray(now, np.float32), recorded, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"the replay of an episode differs from what was recorded, from step {step} on",
            given=f"largest difference {float(np.abs(now - recorded).max()):.3g}",
            allowed="an environment whose episodes follow from the reset's seed and the actions",
            fix="make the environment draw all its chance from its reset's seed, or label without pictures",
        )


def _picture(env: Any) -> np.ndarray:
    frame = env.render()
    if not (isinstance(frame, np.ndarray) and frame.ndim == 3):
        raise UserError(
            "this environment shows no picture",
            given=type(frame).__name__,
            allowed='an environment that draws with render_mode="rgb_array"',
        )
    return frame
