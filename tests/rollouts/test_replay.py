"""What is shown is what happened: episodes played again, drawn, and compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs.errors import UserError
from envs.make import EnvConfig, make_env
from rollouts.clips import ClipRendering, clip_steps, write_request
from rollouts.collect import NoCostModel, collect
from rollouts.replay import Replay, frame_steps, replay_frames, replay_of, window_seed
from tests.rollouts.toys import Counter, random_policy


class Drawn(Counter):
    """Counter whose picture is its observation, in numbers that a pixel can hold."""

    def _obs(self, last: float) -> np.ndarray:
        self.now = super()._obs(last)
        return self.now

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), [int(250 * self.now[0]), self.now[1], self.episode], np.uint8)


def rollout(steps: int = 20) -> Any:
    envs = [Drawn((6, 5, 9), terminating=(1,)), Drawn((20,))]
    return collect(envs, random_policy(3, 2, 3), NoCostModel(), steps=steps, seed=7, iteration=3, first_env=0)


@pytest.mark.parametrize(
    ("length", "frames", "steps"),
    [
        (6, 3, [0, 2, 4, 6]),
        (7, 3, [0, 3, 6, 7]),
        (5, 100, [0, 1, 2, 3, 4, 5]),
        (1, 2, [0, 1]),
        (250, 60, [*range(0, 250, 5), 250]),
    ],
)
def test_frame_steps(length: int, frames: int, steps: list[int]) -> None:
    np.testing.assert_array_equal(frame_steps(length, frames), steps)


def test_every_episode_of_a_window_is_found_again() -> None:
    """Also the second and third after one reset, whose start comes from a generator that has moved on."""
    found = rollout()
    episodes = found.episodes()
    assert [(e.env, e.start, e.end) for e in episodes] == [(0, 0, 6), (0, 6, 11), (0, 11, 20), (1, 0, 20)]
    for number, e in enumerate(episodes):
        replay = replay_of(found, e, seed=7, iteration=3)
        obs = found.obs[e.start : e.end, e.env]
        env = Drawn((6, 5, 9), terminating=(1,)) if e.env == 0 else Drawn((20,))
        frames, steps = replay_frames(env, replay, obs, 100)
        assert len(frames) == len(steps) == len(e) + 1
        for step, frame in zip(steps, frames, strict=True):
            start, expected = int(250 * obs[0, 0]), number if e.env == 0 else 0
            np.testing.assert_array_equal(frame[0, 0], [start, step, expected])


def test_the_seed_is_the_collector_s() -> None:
    env = Drawn((20,))
    collect(
        [Drawn((20,)), env], random_policy(3, 2, 3), NoCostModel(), steps=2, seed=7, iteration=3, first_env=4
    )
    assert env.seeds[0] == window_seed(7, 3, 5)


def test_another_episode_is_not_shown() -> None:
    found = rollout()
    e = found.episodes()[2]
    replay = replay_of(found, e, seed=7, iteration=3)
    obs = found.obs[e.start : e.end, e.env].copy()
    for wrong in (
        dataclasses.replace(replay, seed=replay.seed + 1),
        dataclasses.replace(replay, actions=replay.actions + np.float32(0.5)),
    ):
        with pytest.raises(UserError, match="the replay of an episode differs from what was recorded"):
            replay_frames(Drawn((6, 5, 9), terminating=(1,)), wrong, obs, 10)
    obs[4] += 1.0
    with pytest.raises(UserError, match="from step 4 on"):
        replay_frames(Drawn((6, 5, 9), terminating=(1,)), replay, obs, 10)


def test_an_environment_without_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rollout()
    e = found.episodes()[0]
    monkeypatch.setattr(Drawn, "render", lambda self: None)
    with pytest.raises(UserError, match="this environment shows no picture") as caught:
        replay_frames(Drawn((6, 5, 9)), replay_of(found, e, seed=7, iteration=3), found.obs[:6, 0], 10)
    assert 'render_mode="rgb_array"' in str(caught.value)


def test_a_simulator_s_episode_comes_back_to_the_bit() -> None:
    """MuJoCo, from a used environment in one process to a fresh one."""
    cfg = EnvConfig(id="SafetyHopperVelocity-v1", horizon=40)
    env = make_env(cfg)
    policy = random_policy(11, 3, 11)
    found = collect([env], policy, NoCostModel(), steps=80, seed=1, iteration=9)
    again = make_env(cfg)
    for e in found.episodes():
        replay = replay_of(found, e, seed=1, iteration=9)
        now = again.reset(seed=replay.seed)[0]
        for t, action in enumerate(replay.actions):
            if t >= e.start:
                np.testing.assert_array_equal(np.asarray(now, np.float32), found.obs[t, 0])
            now, _, terminated, truncated, _ = again.step(action)
            if terminated or truncated:
                now = again.reset()[0]


# --- in a process of its own


def requested(folder: Path, cfg: EnvConfig, frames: int = 8) -> tuple[Replay, np.ndarray]:
    env = make_env(cfg)
    low, high = env.action_space.low, env.action_space.high
    policy = random_policy(env.observation_space.shape[0], len(low), env.observation_space.shape[0])
    policy.action_low, policy.action_high = low, high
    found = collect([env], policy, NoCostModel(), steps=cfg.horizon or 1, seed=0, iteration=0)
    e = found.episodes()[0]
    replay, obs = replay_of(found, e, 0, 0), found.obs[: len(e), 0]
    folder.mkdir(exist_ok=True)
    (folder / "env.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    write_request(folder, "a" * 20, replay, obs, frames)
    return replay, obs


def rendered(folder: Path, clips: list[str]) -> str | None:
    rendering = ClipRendering(folder, clips)
    try:
        deadline = time.monotonic() + 120
        while not rendering.done():
            if (problem := rendering.problem()) is not None:
                return problem
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return None
    finally:
        rendering.stop()


def test_clips_are_drawn_by_a_child(tmp_path: Path) -> None:
    requested(tmp_path, EnvConfig(kind="gym", id="Pendulum-v1", horizon=30))
    assert clip_steps(tmp_path, "a" * 20) is None
    assert rendered(tmp_path, ["a" * 20]) is None
    steps = clip_steps(tmp_path, "a" * 20)
    assert steps == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    pictures = [
        np.asarray(Image.open(tmp_path / "clips" / ("a" * 20) / f"{i:05d}.jpg")).astype(int)
        for i in range(len(steps))
    ]
    assert pictures[0].std() > 10
    assert min(np.abs(a - b).mean() for a, b in itertools.pairwise(pictures)) > 0.1


def test_a_child_that_cannot_draw_says_why(tmp_path: Path) -> None:
    requested(tmp_path, EnvConfig(kind="gym", id="tests.trainers.toy_envs:Throttle-v0", horizon=10))
    problem = rendered(tmp_path, ["a" * 20])
    assert problem is not None
    assert "unexpected keyword argument 'render_mode'" in problem
    assert "MUJOCO_GL=egl" in problem
    assert "MUJOCO_GL=osmesa" in problem
