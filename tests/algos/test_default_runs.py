"""The default job on seeds that no setting was chosen on: nine runs, a quarter of an hour on two cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ARMS, SEEDS = ("ppo", "ppo_lag", "tracess"), (30, 31, 32)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """Mean `return` and true `cost` of 100 episodes of the policies as trained, by arm, one per seed."""
    folder = tmp_path_factory.mktemp("study")
    settings = 'settings="rollout.num_env_runners=0"'
    command = [sys.executable, str(CHECKOUT / "launch" / "study.py"), "name=default", settings, "jobs=2"]
    command += [f"algos=[{','.join(ARMS)}]", f"seeds=[{','.join(map(str, SEEDS))}]"]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    rows = json.loads((folder / "runs" / "default" / "results.json").read_text())
    assert len(rows) == len(ARMS) * len(SEEDS)
    print(out.stdout)
    return {
        arm: {key: np.array([row[key] for row in rows if row["arm"] == arm]) for key in ("return", "cost")}
        for arm in ARMS
    }


def test_without_a_constraint_the_budget_is_broken(study: dict[str, dict[str, np.ndarray]]) -> None:
    cost = study["ppo"]["cost"]
    assert (cost >= 50).all()


def test_the_oracle_learns_where_the_budget_is(study: dict[str, dict[str, np.ndarray]]) -> None:
    cost = study["ppo_lag"]["cost"]
    assert (cost <= 35).all()
    assert (study["ppo_lag"]["return"] > 400).all()


def test_labels_alone_keep_the_hidden_budget(study: dict[str, dict[str, np.ndarray]]) -> None:
    cost, share = study["tracess"]["cost"], study["tracess"]["return"] / study["ppo_lag"]["return"]
    assert (cost <= 30).all()
    assert ((cost <= 25) & (share >= 0.6)).sum() >= 2
