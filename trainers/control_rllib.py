"""Control engine, the heavy half: RLlib's Algorithm with a lean path inside.

The env runner (`trainers.control_runner`) samples whole arrays instead of episode objects, the learner
(`trainers.control_learner`) makes one fused update, and the Algorithm's `training_step` here joins them:
weights out, rollouts in, multiplier, update, the paper's own step. What an algorithm fills is in
`trainers.control.ControlAlgorithm`; this file knows no paper.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from envs.errors import UserError
from rollouts.collect import Interrupted
from rollouts.trajectories import EnvSpec, Rollout, concatenate
from trainers.control_learner import ControlLearner, ControlModule
from trainers.control_runner import ControlEnvRunner
from trainers.ray_cluster import lost_daemon
from trainers.weights import Weights

GRACE_S = 3.0  # for env runners to close their environments at the end
LOOK_S = 0.5  # how often the learner, while it waits for env runners, looks whether it should stop


class ControlEngineConfig(AlgorithmConfig):
    """RLlib's config with ours inside: `control` (the typed run config) and `env_spec`."""

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or ControlEngine)
        self.control: Any = None
        self.env_spec: Any = None
        self.memory_dim, self.cost_critic = 0, False

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(
            module_class=ControlModule,
            model_config={
                "obs_dim": self.env_spec.obs_dim,
                "memory_dim": self.memory_dim,
                "action_dim": self.env_spec.action_dim,
                "config": self.control.learner,
                "cost_critic": self.cost_critic,
            },
        )

    def get_default_learner_class(self):
        return ControlLearner


class ControlEngine(Algorithm):
    """RLlib Algorithm whose `training_step` runs one iteration; `last_report` holds its metrics."""

    @classmethod
    def get_default_config(cls) -> ControlEngineConfig:
        return ControlEngineConfig()

    def _setup_logdir(self) -> None:
        # RLlib would make a results folder under the user's home; a run has its own directory.
        self._logdir = tempfile.mkdtemp(prefix="seedbed-rllib-")

    def cleanup(self) -> None:
        # RLlib's own would wait for every runner, also for one that hangs.
        manager = self.env_runner_group._worker_manager
        runners = [] if lost_daemon() else list(manager.actors().values())
        if runners:
            ray.wait([r.stop.remote() for r in runners], num_returns=len(runners), timeout=GRACE_S)
        for runner in runners:
            ray.kill(runner)
        manager.clear()
        super().cleanup()
        shutil.rmtree(self._logdir, ignore_errors=True)

    def bind(self, algorithm, attempt: int = 0) -> None:
        """Give the engine the algorithm whose seams it calls, and the number of this attempt."""
        self.algorithm, self.attempt = algorithm, attempt
        self.step_number, self.env_steps = 0, 0
        self.first_env_step_time: float | None = None
        self.env_runner_restarts = 0
        self.notices: list[str] = []
        self.last_report: dict[str, Any] = {}
        self.should_stop: Callable[[], Any] = lambda: None
        self.updating = False

    @property
    def learner(self) -> ControlLearner:
        return self.learner_group._learner

    def training_step(self) -> None:
        """One iteration. Leaves everything as it was if `should_stop()` comes true while it samples."""
        control, algorithm, learner = self.config.control, self.algorithm, self.learner
        clock = time.perf_counter()
        weights = Weights(
            version=(self.attempt, self.step_number), policy=learner.policy(), cost_model=algorithm.cost_model
        ).seal()
        try:
            rollout = self._sample(weights)
        except Interrupted:
            return
        if rollout.version != weights.version:
            raise RuntimeError(f"asked for samples of weights {weights.version}, got {rollout.version}")
        sampled = time.perf_counter()
        self.updating = True  # until its end the state is of no whole iteration
        hidden_costs = rollout.costs
        if not algorithm.uses_true_cost:
            rollout.costs = None
        constraint = algorithm.constrain(rollout)
        stats = learner.update(
            rollout=rollout,
            augment=weights.cost_model.augment,
            costs=constraint.costs,
            multiplier=constraint.multiplier,
            progress=self.env_steps / control.rollout.env_steps,
            lr_scale=algorithm.lr_scale,
            iteration=self.step_number,
        )
        updated = time.perf_counter()
        own = algorithm.after_step(rollout, hidden_costs, self.step_number)
        self.step_number += 1
        self.env_steps += rollout.rewards.size
        self.updating = False
        episodes = rollout.episodes()
        returns, costs = (
            rollout.episode_sums(rollout.rewards, episodes),
            rollout.episode_sums(hidden_costs, episodes),
        )
        now = time.perf_counter()
        self.last_report = {
            "env_steps": self.env_steps,
            "episode_return": _mean(returns),
            "episode_cost": _mean(costs),
            "episode_length": _mean(np.array([len(e) for e in episodes])),
            "violation_rate": _mean(costs > control.algo.budget),
            "multiplier": constraint.multiplier,
            "p_safe": None,
            "labels_used": 0,
            **own,
            **stats,
            "steps_per_second": rollout.rewards.size / (now - clock),
            "seconds_sampling": sampled - clock,
            "seconds_update": updated - sampled,
            "seconds_algorithm": now - updated,
            "env_runner_restarts": self.env_runner_restarts,
        }

    def _sample(self, weights: Weights) -> Rollout:
        """One iteration's rollout; a dead runner is replaced and its shard drawn again, identically.

        Raises Interrupted once `should_stop()` is true, and UserError when runners are late, cannot be
        replaced, or Ray itself is gone.
        """
        control = self.config.control
        r = control.rollout
        steps = r.steps_per_env or self.config.env_spec.horizon
        shards = split_envs(r.num_envs, r.num_env_runners)
        common = {"iteration": self.step_number, "steps": steps}
        if not r.num_env_runners:
            _, rollout, started = self.env_runner.sample(
                shard=0, envs=shards[0], weights=weights, should_stop=self.should_stop, **common
            )
            self.first_env_step_time = self.first_env_step_time or started
            return rollout
        runners = self.env_runner_group._worker_manager.actors()
        self._check_cluster()
        reference, done = ray.put(weights), {}
        restarting: set[int] = set()

        def ask(i: int) -> ray.ObjectRef:
            return runners[i + 1].sample.remote(shard=i, envs=shards[i], weights=reference, **common)

        asked = {ask(i): i for i in range(len(shards))}
        deadline = time.monotonic() + r.timeout_s
        while asked:
            left = deadline - time.monotonic()
            ready, _ = ray.wait(list(asked), timeout=min(LOOK_S, max(0.0, left)))
            if self.should_stop():
                raise Interrupted
            self._check_cluster()
            if left <= 0:
                raise UserError(
                    f"the learner waited {r.timeout_s:g} s for env runners "
                    f"{sorted(i + 1 for i in asked.values())} in iteration {self.step_number}",
                    given=f"rollout.timeout_s={r.timeout_s:g}"
                    + (f"; of them dead and starting again: {sorted(restarting)}" if restarting else ""),
                    fix="look for a hanging environment or a busy node, or raise rollout.timeout_s",
                )
            if not ready:
                continue
            i = asked.pop(ready[0])
            try:
                _, done[i], started = ray.get(ready[0])
                self.first_env_step_time = min(self.first_env_step_time or started, started)
                restarting.discard(i + 1)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause or error
                cause.add_note(f"(in env runner {i + 1}, iteration {self.step_number})")
                raise cause from error
            except ray.exceptions.ActorUnavailableError:
                if i + 1 not in restarting:
                    restarting.add(i + 1)
                    self.env_runner_restarts += 1
                    self.notices.append(
                        f"env runner {i + 1} died; a new one takes its place and its share is drawn again"
                    )
                time.sleep(0.1)
                asked[ask(i)] = i
            except ray.exceptions.RayActorError as error:
                raise UserError(
                    f"env runner {i + 1} died in iteration {self.step_number} and is not started again",
                    given=f"rollout.max_restarts={r.max_restarts}",
                    fix="look at the node's memory and at the environment, then resume the run",
                ) from error
        return concatenate([done[i] for i in range(len(shards))])

    @staticmethod
    def _check_cluster() -> None:
        if lost := lost_daemon():
            raise UserError(
                "Ray's own processes are gone, so no env runner can be reached",
                given=lost,
                fix="look at the node's memory and at what may have killed it, then resume the run",
            )

    def state_tree(self) -> dict[str, Any]:
        """Everything a resumed run needs, as a checkpoint tree."""
        return {
            "engine": {"step": self.step_number, "env_steps": self.env_steps, "attempt": self.attempt},
            "learner": self.learner.state_tree(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Undo of `state_tree`; the attempt counts up, so older samples can be told apart.

        Raises UserError for the tree of another environment, network or algorithm.
        """
        try:
            self.step_number, self.env_steps = tree["engine"]["step"], tree["engine"]["env_steps"]
            self.attempt = tree["engine"]["attempt"] + 1
            self.learner.load_state_tree(tree["learner"])
            self.algorithm.load_state_dict(tree["algorithm"])
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            control = self.config.control
            raise UserError(
                "the checkpoint was written with another environment, network or algorithm",
                given=f"{type(error).__name__}: {str(error).splitlines()[-1].strip()}",
                allowed=f"a checkpoint of algo={control.algo.name} on {control.env.id}",
                fix="put this run's own checkpoint back, or start a new run",
            ) from error


def split_envs(num_envs: int, num_runners: int) -> list[range]:
    """Environment indices of each runner's shard, as even as possible, larger shards first."""
    shards = max(1, num_runners)
    size, extra = divmod(num_envs, shards)
    starts = [i * size + min(i, extra) for i in range(shards + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(shards)]


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def build_engine(control, env_spec: EnvSpec, algorithm, attempt: int = 0) -> ControlEngine:
    """An engine ready to `train()`; Ray must be up when `rollout.num_env_runners` > 0."""
    torch.set_num_threads(1)
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # a notice about API stacks at every start
    r = control.rollout
    config = ControlEngineConfig()
    config.control, config.env_spec = control, env_spec
    config.memory_dim, config.cost_critic = algorithm.memory_dim, algorithm.constrained
    config = (
        config.env_runners(
            env_runner_cls=ControlEnvRunner,
            num_env_runners=0,  # remote ones are added below
            num_envs_per_env_runner=1,
        )
        .fault_tolerance(
            restart_failed_env_runners=True,
            max_num_env_runner_restarts=r.max_restarts,
            delay_between_env_runner_restarts_s=0.0,
        )
        .environment(env="seedbed")
        .debugging(seed=control.run.seed, log_level="ERROR")
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
    )
    config._dont_auto_sync_env_runner_states = True
    engine = config.build_algo()
    # The config travels inside the call that makes a runner: what RLlib puts into the object store instead
    # might be lost, and then a runner that dies could not be made again (ray#53727).
    engine.env_runner_group._remote_config_obj_ref = engine.config
    engine.env_runner_group.add_workers(r.num_env_runners)
    # Their start is no part of the first iteration; one that does not come up is told there.
    started = [runner.ping.remote() for runner in engine.env_runner_group._worker_manager.actors().values()]
    if started:
        ray.wait(started, num_returns=len(started), timeout=r.timeout_s)
    engine.bind(algorithm, attempt)
    return engine
