"""Evaluation on an environment known by heart, its file on disk, and what it says when it cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.errors import UserError
from evaluators.control import evaluate_run, print_table, summarize

COUNTING = {
    "env.kind": "gym",
    "env.id": "tests.evaluators.counting:Counting-v0",
    "env.horizon": 12,
    "env.cost": "obs_above:0:0.5",
}
Z2 = 1.959963984540054**2


def test_what_is_written(untrained_run: Callable[..., Path]) -> None:
    # Twelve steps of reward 1; every third one costs 1: return 12 and cost 4 in every episode.
    path = untrained_run(**COUNTING, **{"algo.budget": 3.0})
    result = evaluate_run(path, episodes=10, seed=1, video=False)
    assert result == json.loads((path / "evaluation.json").read_text())
    for policy in (result, result["deterministic"]):
        assert policy["episode_return"] == {"mean": 12.0, "ci95": [12.0, 12.0], "n": 10}
        assert policy["episode_cost"] == {"mean": 4.0, "ci95": [4.0, 4.0], "n": 10}
        assert policy["episode_length"]["mean"] == 12.0
        assert policy["violation_rate"]["mean"] == 1.0
        assert policy["violation_rate"]["ci95"] == pytest.approx([10 / (10 + Z2), 1.0])
    assert (result["checkpoint_step"], result["budget"], result["horizon"]) == (7, 3.0, 12)


def test_a_cost_at_the_budget_is_no_violation(untrained_run: Callable[..., Path]) -> None:
    path = untrained_run(**COUNTING, **{"algo.budget": 4.0})
    assert evaluate_run(path, episodes=5, video=False)["violation_rate"]["mean"] == 0.0


def test_summarize_by_hand() -> None:
    played = {
        "episode_return": np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        "episode_cost": np.array([0.0, 10.0, 25.0, 26.0, 39.0]),
        "episode_length": np.full(5, 250.0),
    }
    found = summarize(played, budget=25.0)
    assert found["episode_return"]["ci95"] == pytest.approx([1.037, 4.963], abs=1e-3)
    assert found["episode_cost"]["mean"] == 20.0
    assert found["violation_rate"]["mean"] == 0.4


def test_same_seed_same_numbers_other_seed_other_numbers(untrained_run: Callable[..., Path]) -> None:
    path = untrained_run(**{"env.id": "SafetyHopperVelocity-v1", "env.horizon": 30})
    first, again, other = (
        evaluate_run(path, episodes=6, seed=seed, video=False)["episode_return"] for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_the_table_names_what_it_shows(
    untrained_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(evaluate_run(untrained_run(**COUNTING), episodes=4, video=False))
    out = capsys.readouterr().out
    for text in ("4 episodes", "budget 25", "12.0 [12.0, 12.0]", "4.0 [4.0, 4.0]", "0% [0%, 49%]"):
        assert text in out, out


def test_a_run_without_a_checkpoint(untrained_run: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"no checkpoint yet(.|\n)*checkpoint_every"):
        evaluate_run(untrained_run(checkpoint=False, **COUNTING), video=False)


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run"):
        evaluate_run(tmp_path / "nowhere")


def test_no_episodes(untrained_run: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="episodes=0"):
        evaluate_run(untrained_run(**COUNTING), episodes=0)


def test_a_checkpoint_of_another_network(untrained_run: Callable[..., Path]) -> None:
    path = untrained_run(**COUNTING)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    config["learner"]["hidden_sizes"] = [32]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit"):
        evaluate_run(path, episodes=1, video=False)
