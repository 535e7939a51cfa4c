"""A run directory as a training leaves it, written through Run: warm-up, constraint, evaluation, video."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from trainers.run import Run, RunConfig

CONFIG = {
    "algorithm": {"class_path": "algos.example.Example", "aliases": ["<b>alias</b>"]},
    "env": {
        "kind": "safety-gym",
        "id": "SafetyHalfCheetahVelocity-v1",
        "horizon": 250,
        "options": {"a": {"b": 1}},
    },
    "algo": {"name": "example", "budget": 25.0, "p_safe_limit": 0.9, "gate": None},
    "learner": {"lr": 6e-4, "hidden_sizes": [64, 64], "gamma": 0.99},
    "rollout": {"num_env_runners": 0, "envs_per_runner": 16},
    "size": "default",
}
NOTES = ["horizon cut from 1000 to 250 steps, budget left at 25", "4,000 env steps x 120 = 480,000 & <more>"]


def write_run(runs: Path, steps: int = 120, video: bool = True) -> Path:
    dice = np.random.default_rng(0)
    cfg = RunConfig(dir=str(runs), name="example-run", display="off", seed=5)
    with Run.create(cfg, CONFIG, "-") as run:
        for step in range(1, steps + 1):
            active = step > 45
            cost = 55 * math.exp(-(((step - 50) / 14) ** 2)) + 16 * active + abs(dice.normal(0, 3))
            sampling, update = 1.2 + dice.normal(0, 0.05), 0.6 + dice.normal(0, 0.03)
            metrics = {
                "env_steps": 4000 * step,
                "episode_return": 420 * (1 - math.exp(-step / 35)) + dice.normal(0, 12),
                "episode_cost": cost,
                "violation_rate": float(np.clip((cost - 12) / 30 + dice.normal(0, 0.08), 0, 1)),
                "p_safe": 1 - 0.6 * math.exp(-(step - 45) / 12) if active else None,
                "p_safe_corrected": 0.97 - 0.7 * math.exp(-(step - 45) / 12) if active else None,
                "labels_used": 2 * step + 48 * active + 2 * max(0, step - 45),
                "label_queries": 60 * step,
                "multiplier": min(3.0, 1 + 0.05 * (step - 45)) if active else 0.0,
                "steps_per_second": 4000 / (sampling + update),
                "seconds_sampling": sampling,
                "seconds_update": update,
                "loss": 0.3 * math.exp(-step / 50) + dice.normal(0, 0.01),
                "kl": 0.01 + abs(dice.normal(0, 0.004)),
                "clip_fraction": 0.1 + dice.normal(0, 0.01),
                "policy_std": 0.6 * math.exp(-step / 100),
            }
            if step == 1:
                metrics["first_env_step_seconds"] = 8.4
            run.report(step, metrics)
            if step == 46:
                run.event("constraint active: estimator fitted on 138 labels, 71 % of them safe")
        run.event("<script>alert('an event')</script>")
        run.checkpoint(steps, {"weights": np.zeros(3)})
    (run.path / "notes.json").write_text(json.dumps(NOTES))
    (run.path / "evaluation.json").write_text(json.dumps(evaluation()))
    if video:
        import imageio

        frames = [np.full((64, 64, 3), 4 * i, np.uint8) for i in range(20)]
        imageio.mimsave(run.path / "video.mp4", frames, fps=20)
    return run.path


def evaluation() -> dict:
    return {
        "episode_return": {"mean": 412.25, "ci95": [398.5, 426.0], "n": 32},
        "episode_cost": {"mean": 15.5, "ci95": [13.25, 17.75], "n": 32},
        "violation_rate": {"mean": 0.125, "ci95": [0.05, 0.28], "n": 32},
        "deterministic": {
            "episode_return": {"mean": 533.0, "ci95": None, "n": 32},
            "episode_cost": {"mean": 41.0, "ci95": [38.0, 44.0], "n": 32},
            "violation_rate": {"mean": 1.0, "ci95": [0.89, 1.0], "n": 32},
        },
        "budget": 25.0,
        "checkpoint_step": 120,
        "env": "<Env-v0>",
    }
