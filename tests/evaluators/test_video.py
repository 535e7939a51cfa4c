"""Rendering for real where this machine can, and the message where it cannot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import imageio
import numpy as np
import pytest

from envs import headless
from evaluators import video
from evaluators.control import evaluate_run
from evaluators.video import Rendering, annotate

HOPPER = {"env.id": "SafetyHopperVelocity-v1", "env.horizon": 24}


def test_a_real_video(untrained_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    path = untrained_run(**HOPPER)
    result = evaluate_run(path, episodes=2)
    if result["video"] is None and not os.environ.get("CI"):
        pytest.skip(f"this machine cannot render: {result['video_problem']}")
    assert result["video"] == "video.mp4", result["video_problem"]
    with imageio.get_reader(path / "video.mp4") as reader:
        meta = reader.get_meta_data()
        frames = [np.asarray(frame) for frame in reader]
    assert meta["size"] == (video.WIDTH, video.HEIGHT)
    assert meta["fps"] == video.FRAMES_PER_SECOND
    # The hopper falls before the horizon, or not: one frame a step and one for the start.
    assert 2 <= len(frames) <= 25
    picture = frames[0][30:]
    assert picture.std() > 10, "a picture of one colour"
    assert np.abs(frames[-1][30:].astype(int) - picture).mean() > 0.5, "nothing moves"
    assert not list(path.glob(".tmp-*"))


def test_no_way_to_draw_is_a_message_not_a_crash(
    untrained_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "glow-worm")
    path = untrained_run(**HOPPER)
    result = evaluate_run(path, episodes=2)
    assert result["video"] is None
    assert "MUJOCO_GL=glow-worm" in result["video_problem"]
    assert "libosmesa6" in result["video_problem"]
    assert json.loads((path / "evaluation.json").read_text())["episode_return"]["n"] == 2
    assert not (path / "video.mp4").exists()


def test_the_next_backend_is_tried(
    untrained_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(headless, "BACKENDS", ("glow-worm", "fire-fly"))
    problem = Rendering(untrained_run(**HOPPER), seed=0).wait()
    assert problem is not None
    assert problem.index("MUJOCO_GL=glow-worm") < problem.index("MUJOCO_GL=fire-fly")


def test_annotation_turns_red_after_the_budget() -> None:
    frames = np.full((3, 64, 64, 3), 200, np.uint8)
    trace = {"frame_step": np.array([0, 2, 4]), "reward": np.ones(4), "cost": np.array([1.0, 1.0, 1.0, 0.0])}
    shown = annotate(frames, trace, budget=2.0)
    corner = shown[:, 0, 0].astype(int)  # costs so far: 0, 2, 3
    assert (corner[:2, 0] == corner[:2, 1]).all()
    assert corner[2, 0] > 2 * corner[2, 1]
    assert (shown[:, 30:] == 200).all()
