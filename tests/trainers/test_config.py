"""A saved config becomes typed settings again, or says which part it can't be."""

from __future__ import annotations

import pytest

from algos.ppo_lag import PPOLag, PPOLagConfig
from envs.errors import UserError
from trainers.config import typed
from trainers.control import LearnerConfig

SAVED = {"algorithm": {"class_path": "algos.ppo_lag.PPOLag", "aliases": []}, "size": "long"}


def test_what_is_missing_takes_its_default() -> None:
    settings = typed(SAVED)
    assert settings.algorithm is PPOLag
    assert settings.size == "long"
    assert settings.algo == PPOLagConfig()
    assert settings.learner == LearnerConfig()


def test_values_arrive_in_plain_types() -> None:
    settings = typed(
        SAVED
        | {
            "learner": {"hidden_sizes": [8, 9], "lr": 1},
            "algo": {"multiplier": {"kind": "pid"}},
            "env": {"options": {"a": [1, {"b": None}]}},
        }
    )
    assert type(settings.learner.hidden_sizes) is list
    assert settings.learner.hidden_sizes == [8, 9]
    assert type(settings.learner.lr) is float
    assert settings.algo.multiplier.kind == "pid"
    assert settings.env.options == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"learner": {"momentum": 0.9}}, ["section 'learner'", "'momentum'", "critic_lr"]),
        ({"learner": {"lr": "fast"}}, ["section 'learner'", "'fast'"]),
        ({"algo": {"multiplier": {"kind": "pit"}}}, ["unknown kind of multiplier", "pid"]),
        ({"learners": {}}, ["unknown section 'learners'", "learner"]),
        ({"algorithm": {"class_path": "algos.ppo.Gone"}}, ["algos.ppo.Gone", "can't be loaded"]),
        ({"algorithm": {"class_path": "algos.gone.Gone"}}, ["algos.gone.Gone", "can't be loaded"]),
    ],
)
def test_what_it_does_not_know_is_refused(change: dict, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        typed(SAVED | change)
    for part in parts:
        assert part in str(caught.value)
