"""Runs to evaluate: a run directory with the checkpoint of an untrained policy, made without Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.config import schema, typed
from trainers.control import env_spec
from trainers.normalize import RunningMeanStd
from trainers.ppo import ActorCritics
from trainers.run import Run


@pytest.fixture
def untrained_run(tmp_path: Path) -> Callable[..., Path]:
    """make(**{"env.id": ..., "algo.budget": ...}) -> run directory with a checkpoint at step 7."""

    def make(checkpoint: bool = True, **settings: Any) -> Path:
        resolved: dict[str, Any] = {"algorithm": {"class_path": "algos.ppo.PPO", "aliases": []}}
        for section, node in schema("algos.ppo.PPO").items():
            if section != "algorithm":
                resolved[section] = dataclasses.asdict(node()) if isinstance(node, type) else node
        settings = {"run.dir": str(tmp_path), "run.display": "off", "rollout.num_envs": 4, **settings}
        for key, value in settings.items():
            section, name = key.split(".")
            resolved[section][name] = value
        cfg = typed(resolved)
        run = Run.create(cfg.run, resolved, "untrained")
        if checkpoint:
            spec = env_spec(cfg)
            torch.manual_seed(0)
            nets = ActorCritics(spec.obs_dim, 0, spec.action_dim, cfg.learner, cost_critic=False)
            learner = {"nets": dict(nets.state_dict()), "obs_norm": RunningMeanStd(spec.obs_dim).state_dict()}
            run.checkpoint(7, {"algorithm": {}, "learner": learner})
        run.close()
        return run.path

    return make
