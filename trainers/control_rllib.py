"""Control engine, the heavy half: RLlib's Algorithm, EnvRunner and Learner with a lean path inside.

The EnvRunner samples whole arrays instead of episode objects, the Learner makes one fused update, and the
Algorithm's `training_step` joins them: weights out, rollouts in, multiplier, update, the paper's own step.
What an algorithm fills is in `trainers.control.ControlAlgorithm`; this file knows no paper.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch
from gymnasium.spaces import Box
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from envs.errors import UserError
from envs.make import make_env
from rollouts.collect import GaussianPolicy, Interrupted, collect
from rollouts.trajectories import EnvSpec, Rollout, concatenate
from trainers.normalize import RunningMeanStd
from trainers.ppo import ActorCritics, Columns, gae, mixed_advantage, policy_arrays, ppo_update
from trainers.ray_cluster import STOP_SIGNALS, lost_daemon
from trainers.weights import Weights, checksum

GRACE_S = 3.0  # for env runners to close their environments at the end
LOOK_S = 0.5  # how often the learner, while it waits for env runners, looks whether it should stop
UPDATE_STREAM = 2  # first word of the minibatch shuffles' seed, beside rollouts.collect's streams


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


class ControlModule(TorchRLModule):
    """RLlib's handle on the actor and critics; the learner calls `nets` directly."""

    def setup(self) -> None:
        super().setup()
        self.nets = ActorCritics(**self.model_config)


class ControlLearner(TorchLearner):
    """PPO-Lagrangian's update on whole rollouts, with its normalisers and its optimiser's state."""

    def build(self) -> None:
        super().build()
        control, spec = self.config.control, self.config.env_spec
        self.obs_norm = RunningMeanStd(spec.obs_dim)
        self.reward_norm, self.cost_norm = RunningMeanStd(1), RunningMeanStd(1)
        self.learner_config, self.seed = control.learner, control.run.seed

    @property
    def nets(self) -> ActorCritics:
        return self.module[DEFAULT_MODULE_ID].nets

    def configure_optimizers_for_module(self, module_id, config=None) -> None:
        c, nets = self.config.control.learner, self.module[module_id].nets
        actor = [*nets.actor.parameters(), nets.log_std]
        critics = [p for p in nets.parameters() if not any(p is q for q in actor)]
        groups = [{"params": actor, "lr": c.lr}, {"params": critics, "lr": c.critic_lr}]
        self.optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
        self.register_optimizer(module_id=module_id, optimizer=self.optimizer, params=actor + critics)

    def compute_loss_for_module(self, **kwargs):
        """RLlib's per-minibatch hook; `update` replaces the whole path that would call it."""
        raise TypeError("ControlLearner learns by update(rollout=...)")

    def policy(self) -> GaussianPolicy:
        """The current actor as the runners' NumPy copy."""
        arrays = policy_arrays(self.nets, self.obs_norm, self.config.env_spec, self.learner_config)
        return GaussianPolicy(**arrays)

    def update(self, *, rollout: Rollout, augment, costs, multiplier, progress, lr_scale, iteration):
        """One iteration's update in place; returns its statistics.

        costs (T, N) feed the cost critic, or None without one; `augment` adds the cost model's memory to
        normalised observations; `progress` in [0, 1) sets the learning-rate decay.
        Raises UserError when the loss is not finite or when the runners acted under other weights.
        """
        c, policy = self.learner_config, self.policy()
        normalize = policy.normalize
        plain = torch.from_numpy(normalize(rollout.obs))
        inputs = torch.from_numpy(augment(plain.numpy(), rollout.memory))
        final_plain = normalize(rollout.final_obs)
        final_inputs = augment(final_plain, rollout.final_memory)
        if c.normalize_rewards:
            self.reward_norm.update(rollout.rewards[..., None])
        reward_scale = float(self.reward_norm.std[0]) if c.normalize_rewards else 1.0
        nets = self.nets
        advantage, reward_target = self._advantage(
            rollout,
            rollout.rewards / reward_scale,
            nets.reward_critic,
            plain,
            final_plain,
            c.gamma,
            c.gae_lambda,
        )
        cost_advantage = cost_target = None
        if costs is not None:
            if c.normalize_rewards and costs.any():
                self.cost_norm.update(costs[..., None])
            cost_scale = float(self.cost_norm.std[0]) if c.normalize_rewards else 1.0
            cost_advantage, cost_target = self._advantage(
                rollout,
                costs / cost_scale,
                nets.cost_critic,
                inputs,
                final_inputs,
                c.cost_gamma,
                c.cost_gae_lambda,
            )
        mixed = mixed_advantage(advantage, cost_advantage, multiplier, c.standardize_cost_advantage)
        flat_inputs = inputs[:-1].flatten(0, 1).contiguous()
        actions = torch.from_numpy(rollout.actions).flatten(0, 1)
        with torch.no_grad():
            mean = nets.mean(flat_inputs)
            log_prob = nets.log_prob(flat_inputs, actions)
        mismatch = float((mean - torch.from_numpy(rollout.means).flatten(0, 1)).abs().max())
        if mismatch > 1e-3:
            raise UserError(
                f"the env runners acted under other weights than the learner's (iteration {iteration})",
                given=f"largest difference of mean actions {mismatch:.3g}",
                allowed="at most 0.001",
                fix="resume from the last checkpoint; if it comes back, report it with the run's config",
            )
        decay = 1.0 - (1.0 - c.lr_final_fraction) * min(progress, 1.0)
        self.optimizer.param_groups[0]["lr"] = c.lr * decay * lr_scale
        self.optimizer.param_groups[1]["lr"] = c.critic_lr * decay
        before = checksum([p.detach().numpy() for p in nets.parameters()])
        columns = Columns(
            flat_inputs,
            actions,
            log_prob,
            torch.from_numpy(mixed.astype(np.float32)).flatten(),
            torch.from_numpy(reward_target).flatten(),
            None if cost_target is None else torch.from_numpy(cost_target).flatten(),
        )
        generator = torch.Generator().manual_seed(
            int(np.random.default_rng((UPDATE_STREAM, self.seed, iteration)).integers(2**62))
        )
        stats = ppo_update(nets, self.optimizer, columns, c, generator)
        if not np.isfinite(stats["loss"]):
            raise UserError(
                f"the learner's loss is not finite in iteration {iteration}",
                given=str(stats["loss"]),
                fix=f"lower learner.lr ({c.lr}) or learner.critic_lr ({c.critic_lr})",
            )
        moved = checksum([p.detach().numpy() for p in nets.parameters()]) != before
        if not moved and (c.lr > 0 or c.critic_lr > 0):
            raise RuntimeError(f"iteration {iteration} had gradients and a learning rate but moved no weight")
        self.obs_norm.update(rollout.obs[:-1])
        return {**stats, "sampler_mismatch": mismatch, "lr": c.lr * decay * lr_scale}

    @staticmethod
    def _advantage(rollout: Rollout, rewards, critic, inputs, final_inputs, gamma, lam):
        """Advantages and value targets (T, N), float32; time-outs bootstrap from the last state."""
        with torch.no_grad():
            values = critic(inputs)[..., 0].numpy()
            final_values = critic(torch.from_numpy(final_inputs))[..., 0].numpy()
        next_values = values[1:].copy()
        for (t, e), value in zip(rollout.final_index, final_values):
            next_values[t, e] = 0.0 if rollout.terminated[t, e] else value
        advantages = gae(rewards, values[:-1], next_values, rollout.done, gamma, lam)
        return advantages, (advantages + values[:-1]).astype(np.float32)

    def state_tree(self) -> dict[str, Any]:
        """Parameters, optimiser state and normalisers as a checkpoint tree."""
        adam = self.optimizer.state_dict()["state"]
        return {
            "nets": dict(self.nets.state_dict()),
            "adam": {str(i): dict(state) for i, state in adam.items()},
            "obs_norm": self.obs_norm.state_dict(),
            "reward_norm": self.reward_norm.state_dict(),
            "cost_norm": self.cost_norm.state_dict(),
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Undo of `state_tree`; torch checks every shape."""
        self.nets.load_state_dict({k: torch.as_tensor(v) for k, v in tree["nets"].items()})
        full = self.optimizer.state_dict()
        full["state"] = {
            int(i): {k: torch.as_tensor(v) for k, v in state.items()} for i, state in tree["adam"].items()
        }
        self.optimizer.load_state_dict(full)
        for name in ("obs_norm", "reward_norm", "cost_norm"):
            getattr(self, name).load_state_dict(tree[name])


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
    engine.bind(algorithm, attempt)
    return engine
