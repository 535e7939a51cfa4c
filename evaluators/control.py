"""Evaluation of a control run: its last checkpoint in; a table, evaluation.json and a video out.

The engine that trained the run plays the episodes; what is counted and how sure we are is decided here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from evaluators.statistics import Summary, mean_summary, rate_summary
from evaluators.video import Rendering
from trainers.checkpoint import write_error
from trainers.config import engine_of, typed
from trainers.files import replace_file
from trainers.run import Run

LABELS = {"episode_return": "return", "episode_cost": "cost (true)", "violation_rate": "violation rate"}


def evaluate_run(
    run_path: str | Path, episodes: int = 100, seed: int = 0, video: bool = True
) -> dict[str, Any]:
    """Play `episodes` whole episodes with the newest whole checkpoint, twice; write evaluation.json.

    The keys on top describe the stochastic policy, which is the one that was trained and constrained;
    `deterministic` holds the same for its mean action, another policy with a cost of its own. A violation is
    an episode whose true cost exceeds the budget. With `video`, one stochastic episode becomes video.mp4; a
    machine that cannot render gets a `video_problem` instead. Raises UserError without a usable checkpoint.
    """
    if episodes < 1:
        raise UserError("an evaluation needs episodes", given=f"episodes={episodes}", allowed=">= 1")
    run = Run.open(run_path)
    saved = run.latest()
    if saved is None:
        raise UserError(
            f"run {run.name!r} has no checkpoint yet",
            given=str(run.path / "checkpoints"),
            fix="let it train up to its first checkpoint (run.checkpoint_every), then evaluate",
        )
    step, state = saved
    cfg = typed(run.config)
    budget = float(cfg.algo.budget)
    engine = engine_of(cfg.algorithm)
    # A process of its own: the renderer must be chosen before MuJoCo is imported, and may crash alone.
    rendering = Rendering(run.path, seed) if video else None
    try:
        stochastic, deterministic = (
            summarize(
                engine.evaluate(cfg, state, episodes=episodes, deterministic=mean_action, seed=seed), budget
            )
            for mean_action in (False, True)
        )
        problem = rendering.wait() if rendering else None
    finally:
        if rendering:
            rendering.stop()
    result: dict[str, Any] = {
        **stochastic,
        "deterministic": deterministic,
        "run": run.name,
        "env": cfg.env.id,
        "horizon": cfg.env.horizon,
        "budget": budget,
        "checkpoint_step": step,
        "seed": seed,
    }
    if rendering:
        result["video"] = None if problem else "video.mp4"
        if problem:
            result["video_problem"] = problem
    path = run.path / "evaluation.json"
    try:
        replace_file(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise write_error(
            error, "the evaluation", path, "make room or restore access, then repeat"
        ) from error
    return result


def summarize(played: dict[str, np.ndarray], budget: float) -> dict[str, Summary]:
    """Return, true cost and violation rate of episodes given as arrays (n,) by name."""
    return {
        "episode_return": mean_summary(played["episode_return"]),
        "episode_cost": mean_summary(played["episode_cost"]),
        "violation_rate": rate_summary(played["episode_cost"] > budget),
        "episode_length": mean_summary(played["episode_length"]),
    }


def print_table(result: dict[str, Any]) -> None:
    """The evaluation as a table on the terminal, with the video's place or the reason there is none."""
    from rich.console import Console
    from rich.table import Table

    n = result["episode_return"]["n"]
    table = Table(title=f"{result['run']}, step {result['checkpoint_step']}: {n} episodes of {result['env']}")
    table.add_column("95 % confidence in brackets")
    table.add_column("policy as trained", justify="right")
    table.add_column("its mean action", justify="right")
    for key, label in LABELS.items():
        label += f", budget {result['budget']:g}" if key == "episode_cost" else ""
        table.add_row(label, _cell(result[key], key), _cell(result["deterministic"][key], key))
    console = Console()
    console.print(table)
    if result.get("video"):
        console.print(f"video: {result['video']} in the run's folder", highlight=False)
    elif result.get("video_problem"):
        console.print(f"no video: {result['video_problem']}", style="yellow", highlight=False, markup=False)


def _cell(summary: Summary, key: str) -> str:
    def show(value: float) -> str:
        return f"{value:.0%}" if key == "violation_rate" else f"{value:.1f}"

    interval = "" if summary["ci95"] is None else " [{}, {}]".format(*map(show, summary["ci95"]))
    return show(summary["mean"]) + interval
