"""The control engine's env runner: RLlib's, sampling whole arrays through `rollouts.collect`."""

from __future__ import annotations

import signal
import time
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from envs.make import make_env
from rollouts.collect import collect
from rollouts.trajectories import EnvSpec
from trainers.ray_cluster import STOP_SIGNALS


class EnvList:
    """N environments of one kind behind the few names RLlib asks of a vector environment.

    They are made when they are first asked for: an error in RLlib's constructor of a runner would be lost.
    """

    def __init__(self, config, spec: EnvSpec, num_envs: int):
        self.config, self.num_envs = config, num_envs
        self.single_observation_space = self.observation_space = Box(-np.inf, np.inf, (spec.obs_dim,))
        self.single_action_space = self.action_space = Box(spec.action_low, spec.action_high)

    @cached_property
    def envs(self) -> list[Any]:
        return [make_env(self.config) for _ in range(self.num_envs)]

    @property
    def unwrapped(self) -> EnvList:
        return self

    def close(self) -> None:
        for env in vars(self).get("envs", ()):
            env.close()


class ControlEnvRunner(SingleAgentEnvRunner):
    """Samples one shard of an iteration into preallocated arrays."""

    def make_env(self) -> None:
        # Blocked in all that Ray starts; an environment may end its own processes by them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        control = self.config.control
        self.num_envs = -(-control.rollout.num_envs // max(1, control.rollout.num_env_runners))
        self.env = EnvList(control.env, self.config.env_spec, self.num_envs)

    def get_spaces(self):
        spaces = (self.env.observation_space, self.env.action_space)
        return {INPUT_ENV_SPACES: spaces, INPUT_ENV_SINGLE_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    def sample(
        self, *, shard: int, envs: range, iteration: int, weights: Any, steps: int, should_stop=lambda: None
    ):
        """Environments `envs` for `steps` steps under `weights`.

        Returns (shard, rollout, wall-clock time of the first step). Raises UserError for NaN, and
        RuntimeError for weights whose checksum is not the sender's.
        """
        weights.verify()
        mine = self.env.envs[: len(envs)]
        started = time.time()
        rollout = collect(
            mine,
            weights.policy,
            weights.cost_model,
            steps=steps,
            seed=self.config.control.run.seed,
            iteration=iteration,
            first_env=envs.start,
            version=weights.version,
            should_stop=should_stop,
        )
        self._weights_seq_no = weights.version[1]
        self.num_env_steps_sampled_lifetime += rollout.rewards.size
        return shard, rollout, started

    def get_metrics(self):
        return {}

    def apply(self, func, *args, **kwargs):
        # RLlib's own ends the process on any exception; the driver wants to see it.
        return func(self, *args, **kwargs)
