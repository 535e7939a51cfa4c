"""GRPO's default recipe learns. Deterministic, resumes, survives: tests/trainers/test_policy_run.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch import arguments, config
from trainers.config import typed
from trainers.language import check, train
from trainers.metrics import read_metrics
from trainers.run import Run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_reward_rises(seed: int, tmp_path: Path) -> None:
    """As a user types it. A mean over ten steps has a standard error of about 0.01; see seeds/grpo.md."""
    line = [
        "algo=grpo",
        f"run.seed={seed}",
        "rollout.num_workers=0",
        "run.display=off",
        f"run.dir={tmp_path}",
    ]
    values = config.resolved(config.compose(arguments.read(line).argv))
    cfg = typed(values)
    check(cfg)
    with Run.create(cfg.run, values, "run") as run:
        train(cfg, run)
    reward = [row["reward"] for row in read_metrics(run.path)]
    assert len(reward) == 100
    assert np.mean(reward[-10:]) > np.mean(reward[:10]) + 0.04
