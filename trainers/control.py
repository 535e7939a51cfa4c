"""Control engine, the light half: its config, its arithmetic and checks, the training loop, evaluation.

The heavy half (RLlib classes) is `trainers.control_rllib`; the update's mathematics is `trainers.ppo`.
This module imports neither Ray nor torch until `train` or `evaluate` is called.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.errors import UserError
from envs.make import check_env_config, env_has_cost, make_env

if TYPE_CHECKING:
    from rollouts.collect import CostModel
    from rollouts.trajectories import EnvSpec, Episode, Rollout
    from trainers.run import Run


@dataclass(kw_only=True)
class RolloutConfig:
    """How experience is collected. One iteration is `num_envs * steps_per_env` env steps.

    Every iteration starts all environments from a reset seeded by (run seed, iteration, env index), so a
    redrawn or resumed iteration is the same iteration, whichever process draws it.
    """

    env_steps: int = 480_000  # total, over all environments
    num_envs: int = 16  # over all runners
    steps_per_env: int | None = None  # per iteration; None: one horizon
    num_env_runners: int = 2  # remote processes; 0 samples in the driver
    timeout_s: float = 300.0  # per sampling request, then the run stops and says who waits for whom
    max_restarts: int = 100  # of one env runner, over the run


@dataclass(kw_only=True)
class LearnerConfig:
    """PPO's settings. Defaults: the recipe that runs on two cores in minutes."""

    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    activation: str = "tanh"  # tanh | relu
    squash_mean: bool = True  # Gaussian mean = tanh(output), in units of the action range
    log_std_init: float = -0.5  # of the Gaussian, in units of half the action range
    log_std_min: float = -1.6
    log_std_max: float = 0.0
    lr: float = 1e-3  # actor
    critic_lr: float = 1e-3
    lr_final_fraction: float = 0.1  # linear decay over the run; 1.0 keeps the rate
    epochs: int = 10  # passes over the batch
    minibatch_steps: int = 250  # env steps per gradient step
    clip: float = 0.2
    target_kl: float | None = 0.03  # the actor stops for this iteration above it; None: never
    gamma: float = 0.99
    gae_lambda: float = 0.95
    cost_gamma: float = 0.99
    cost_gae_lambda: float = 0.95
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    critic_l2: float = 0.0  # weight penalty of the reward critic
    cost_critic_l2: float = 0.0
    max_grad_norm: float = 0.5  # of the actor
    normalize_obs: bool = True
    normalize_rewards: bool = True  # divide rewards (and costs) by a running standard deviation
    standardize_cost_advantage: bool = True  # divide the centred cost advantage by max(its std, 0.1)


SECTIONS = {"rollout": RolloutConfig, "learner": LearnerConfig}
ENVS = ("safety-gym", "gym")  # what env= may name, the default first
EVALUATOR = "evaluators.control"


def extras(cfg: Any) -> list[str]:
    """Optional dependencies that a config needs."""
    return ["safety"] if cfg.env.kind == "safety-gym" else []


@dataclass
class Constraint:
    """What an iteration's update needs of the constraint."""

    costs: np.ndarray | None  # (T, N) per-step costs for the cost critic; None without one
    multiplier: float  # lambda for this update


class ControlAlgorithm:
    """The seams of a control algorithm. Left alone it is PPO; a paper overrides what it changes.

    An instance lives in the driver. Only `cost_model` travels to the env runners, once an iteration, as
    part of the numbered weights.
    """

    engine = "trainers.control"
    Config: type
    uses_true_cost = False  # True: `constrain` sees the environment's costs (an oracle, PPO-Lagrangian)
    constrained = False  # True: a cost critic is built
    memory_dim = 0  # columns that `cost_model.augment` adds to the policy's input
    lr_scale = 1.0  # multiplies the actor's learning rate in this iteration
    headline: tuple[tuple[str, str], ...] = ()  # (label, metric) shown beside return and cost

    def __init__(self, config: Any, spec: EnvSpec, seed: int):
        from rollouts.collect import NoCostModel

        self.config, self.spec, self.seed = config, spec, seed
        self.cost_model: CostModel = NoCostModel()

    @classmethod
    def check(cls, cfg: Any) -> None:
        """Raise UserError for settings that cannot work; called before Ray starts."""

    @classmethod
    def needs_cost(cls, cfg: Any) -> bool:
        """Whether a constrained algorithm cannot work in an environment without a cost."""
        return True

    @classmethod
    def describe(cls, cfg: Any) -> list[str]:
        """Lines of derived arithmetic and caveats, printed before the run."""
        return []

    def begin(self, run: Run, resumed: bool) -> None:
        """Called once before the first iteration; after `load_state_dict` when the run is taken up again."""

    def end(self) -> None:
        """Called once when the run ends, however it does."""

    def constrain(self, rollout: Rollout) -> Constraint:
        """Per-step costs and multiplier for this update. `rollout.costs` is None unless uses_true_cost."""
        return Constraint(None, 0.0)

    def after_step(self, rollout: Rollout, hidden_costs: np.ndarray, iteration: int) -> dict[str, Any]:
        """Called after the update: query labels, refit, refresh `cost_model`. Returns metrics.

        May raise `rollouts.collect.Interrupted` when the run is asked to stop: the last checkpoint stands.

        `hidden_costs` (T, N) is for a label oracle alone; it stands for what an annotator could see.
        """
        return {}

    def notices(self) -> list[str]:
        """Sentences to show the user once, since the last call."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive a restart, as a checkpoint tree."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of `state_dict`."""


def iteration_steps(cfg: Any) -> tuple[int, int]:
    """(env steps per environment, env steps in all) of one iteration."""
    per_env = cfg.rollout.steps_per_env or cfg.env.horizon
    return per_env, per_env * cfg.rollout.num_envs


def planned_iterations(cfg: Any) -> int:
    """Iterations the run takes: the env steps asked for, rounded up, capped by run.max_steps."""
    planned = -(-cfg.rollout.env_steps // iteration_steps(cfg)[1])
    return planned if cfg.run.max_steps is None else min(planned, cfg.run.max_steps)


def check(cfg: Any) -> None:
    """Every check that needs no Ray and no environment step. Raises UserError."""
    check_env_config(cfg.env)
    r, c = cfg.rollout, cfg.learner
    for name, value in (("rollout.env_steps", r.env_steps), ("rollout.num_envs", r.num_envs)):
        _at_least(name, value, 1)
    _at_least("rollout.num_env_runners", r.num_env_runners, 0)
    _at_least("rollout.max_restarts", r.max_restarts, 0)
    positive = {"rollout.timeout_s": r.timeout_s, "learner.clip": c.clip, "learner.target_kl": c.target_kl}
    for name, value in {**positive, "learner.max_grad_norm": c.max_grad_norm}.items():
        if value is not None and not value > 0:
            raise UserError(f"{name} must be more than 0", given=value, allowed="(0, inf)")
    if r.num_env_runners > r.num_envs:
        raise UserError(
            "more env runners than environments",
            given=f"rollout.num_env_runners={r.num_env_runners}, rollout.num_envs={r.num_envs}",
            allowed=f"0 to {r.num_envs} runners",
            fix=f"set rollout.num_env_runners={r.num_envs} or raise rollout.num_envs",
        )
    if r.steps_per_env is not None and r.steps_per_env < cfg.env.horizon:
        raise UserError(
            "an iteration is shorter than an episode, so no episode would ever be whole",
            given=f"rollout.steps_per_env={r.steps_per_env}, env.horizon={cfg.env.horizon}",
            allowed=f"at least {cfg.env.horizon}",
            fix="leave rollout.steps_per_env out (one horizon) or shorten env.horizon",
        )
    total = iteration_steps(cfg)[1]
    if not 1 <= c.minibatch_steps <= total:
        raise UserError(
            "a minibatch must fit into an iteration",
            given=f"learner.minibatch_steps={c.minibatch_steps}",
            allowed=f"1 to {total} (rollout.num_envs x steps per environment)",
            fix=f"set learner.minibatch_steps={min(250, total)}",
        )
    for name in ("lr", "critic_lr", "entropy_coef", "value_coef", "critic_l2", "cost_critic_l2"):
        _at_least(f"learner.{name}", getattr(c, name), 0)
    for name in ("gamma", "cost_gamma", "gae_lambda", "cost_gae_lambda", "lr_final_fraction"):
        if not 0 <= getattr(c, name) <= 1:
            raise UserError(f"learner.{name} must lie in [0, 1]", given=getattr(c, name), allowed="[0, 1]")
    if c.activation not in ("tanh", "relu"):
        raise UserError("unknown activation", given=c.activation, allowed=("tanh", "relu"))
    if not c.hidden_sizes or min(c.hidden_sizes) < 1:
        raise UserError("learner.hidden_sizes needs at least one layer of width >= 1", given=c.hidden_sizes)
    _at_least("learner.epochs", c.epochs, 1)
    if not c.log_std_min <= c.log_std_init <= c.log_std_max:
        raise UserError(
            "the policy must start between the limits of its spread",
            given=f"learner.log_std_init={c.log_std_init:g}",
            allowed=f"learner.log_std_min={c.log_std_min:g} to learner.log_std_max={c.log_std_max:g}",
        )
    if not cfg.algo.budget >= 0:
        raise UserError(
            "a cost budget cannot be negative",
            given=cfg.algo.budget,
            allowed="[0, inf)",
            fix="set algo.budget=25",
        )
    needs_cost = cfg.algorithm.constrained and cfg.algorithm.needs_cost(cfg)
    if needs_cost and not env_has_cost(cfg.env):
        raise UserError(
            f"algo={cfg.algo.name} constrains a cost, but this environment has none",
            given=f"env.id={cfg.env.id}, env.cost={cfg.env.cost}",
            allowed="a Safety-Gymnasium id, or env=gym with a cost function",
            fix="choose env=safety-gym, or set env.cost (see envs/costs.py), or use algo=ppo",
        )
    cfg.algorithm.check(cfg)


def _at_least(name: str, value: float, low: float) -> None:
    if not low <= value < math.inf:
        raise UserError(f"{name} must be at least {low}", given=value, allowed=f"[{low}, inf)")


def describe(cfg: Any) -> list[str]:
    """The arithmetic derived from the config, one line each."""
    r, c = cfg.rollout, cfg.learner
    per_env, total = iteration_steps(cfg)
    iterations = planned_iterations(cfg)
    shards = f"{r.num_env_runners} env runners" if r.num_env_runners else "the driver"
    lines = [
        f"{iterations} iterations x {r.num_envs} envs x {per_env} steps = {iterations * total:,} env steps, "
        f"in {shards}",
        f"{total} steps / {c.minibatch_steps} per minibatch x at most {c.epochs} epochs = at most "
        f"{total // c.minibatch_steps * c.epochs} gradient steps an iteration",
        f"episodes end after {cfg.env.horizon} steps; budget {cfg.algo.budget:g} cost an episode",
    ]
    return lines + cfg.algorithm.describe(cfg)


def resources(cfg: Any) -> dict[str, float]:
    """CPUs the env runners take (the learner works while they wait) and memory in GiB, as measured."""
    return {
        "cpus": max(1, cfg.rollout.num_env_runners),
        "memory_gib": 1.5 + 0.6 * cfg.rollout.num_env_runners,
    }


def env_spec(cfg: Any) -> EnvSpec:
    """Sizes of the configured environment, from one instance of it."""
    from rollouts.trajectories import EnvSpec

    env = make_env(cfg.env)
    low, high = env.action_space.low, env.action_space.high
    obs_dim = env.observation_space.shape[0]
    env.close()
    return EnvSpec(
        obs_dim=obs_dim,
        action_low=low.astype(np.float32),
        action_high=high.astype(np.float32),
        horizon=cfg.env.horizon,
    )


def train(cfg: Any, run: Run) -> None:
    """The whole loop: iterate, report, checkpoint, stop when asked. Resumes when `run` has a checkpoint.

    Raises UserError for what the user can mend. What ends the run while it samples (a signal, an
    environment's NaN, lost workers) leaves a checkpoint of the last whole iteration; what ends it in an
    update leaves the checkpoints that are there.
    """
    from trainers.display import HeadlineItem
    from trainers.ray_cluster import local_cluster

    headline = [
        HeadlineItem("return", "episode_return"),
        HeadlineItem("true cost", "episode_cost", f" / {cfg.algo.budget:g}"),
        *(HeadlineItem(label, metric) for label, metric in cfg.algorithm.headline),
    ]
    iterations = planned_iterations(cfg)
    run.plan(iterations, iterations * iteration_steps(cfg)[1], headline)
    spec = env_spec(cfg)
    algorithm = cfg.algorithm(cfg.algo, spec, cfg.run.seed)
    with ExitStack() as stack:
        with run.starting():
            stack.enter_context(local_cluster(cfg.rollout.num_env_runners))
            from trainers.control_rllib import build_engine

            engine = build_engine(cfg, spec, algorithm)
            engine.should_stop = lambda: run.stopped_by
            stack.callback(engine.stop)
            saved = run.latest()
            if saved is not None:
                engine.load_state_tree(saved[1])
            run.resume_at(engine.step_number)  # 0 without a checkpoint: the run starts over
        stack.callback(algorithm.end)
        algorithm.begin(run, resumed=saved is not None)
        for sentence in algorithm.notices():
            run.event(sentence)
        _iterate(cfg, run, engine, algorithm)


def _iterate(cfg: Any, run: Run, engine: Any, algorithm: ControlAlgorithm) -> None:
    from rollouts.collect import Interrupted

    iterations, saved_at = planned_iterations(cfg), engine.step_number
    try:
        while engine.step_number < iterations and not run.should_stop():
            before = engine.step_number
            engine.train()
            if engine.step_number == before:  # a signal came while it sampled
                break
            report = engine.last_report
            if engine.first_env_step_time is not None and engine.step_number == 1:
                report["first_env_step_seconds"] = engine.first_env_step_time - _process_start()
            run.report(engine.step_number, report)
            for sentence in engine.notices + algorithm.notices():
                run.event(sentence)
            engine.notices.clear()
            if engine.step_number % cfg.run.checkpoint_every == 0:
                run.checkpoint(engine.step_number, engine.state_tree())
                saved_at = engine.step_number
    except Interrupted:
        run.finish("stopped", run.should_stop())
        return
    except Exception as error:
        if not engine.updating and run.last_step == engine.step_number > saved_at:
            try:
                run.checkpoint(engine.step_number, engine.state_tree())
            except UserError as second:
                error.add_note(str(second))
        raise
    if engine.step_number != saved_at:
        run.checkpoint(engine.step_number, engine.state_tree())
    if reason := run.should_stop():
        run.finish("stopped", reason)


def _process_start() -> float:
    """Wall-clock time at which this process started, seconds since the epoch."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = float(stat.read().rsplit(")", 1)[1].split()[19])
        age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@dataclass
class _Actor:
    """What acts in evaluation: a policy, its cost model, and the environment's sizes."""

    policy: Any
    cost_model: Any
    spec: Any


def load_actor(cfg: Any, state: dict[str, Any]) -> _Actor:
    """The policy of a checkpoint tree, without Ray. Raises UserError when it does not fit the config."""
    import torch

    from rollouts.collect import GaussianPolicy
    from trainers.normalize import RunningMeanStd
    from trainers.ppo import ActorCritics, policy_arrays

    torch.set_num_threads(1)
    spec = env_spec(cfg)
    algorithm = cfg.algorithm(cfg.algo, spec, cfg.run.seed)
    algorithm.load_state_dict(state["algorithm"])
    nets = ActorCritics(
        spec.obs_dim, algorithm.memory_dim, spec.action_dim, cfg.learner, algorithm.constrained
    )
    try:
        nets.load_state_dict({k: torch.as_tensor(v) for k, v in state["learner"]["nets"].items()})
    except (RuntimeError, KeyError) as error:
        raise UserError(
            "the checkpoint does not fit this environment or network",
            given=f"env.id={cfg.env.id}: {str(error).splitlines()[-1].strip()}",
            fix="evaluate with the config the run was trained with",
        ) from error
    norm = RunningMeanStd(spec.obs_dim)
    norm.load_state_dict(state["learner"]["obs_norm"])
    policy = GaussianPolicy(**policy_arrays(nets, norm, spec, cfg.learner))
    return _Actor(policy, algorithm.cost_model, spec)


def evaluate(
    cfg: Any, state: dict[str, Any], *, episodes: int, deterministic: bool, seed: int
) -> dict[str, np.ndarray]:
    """Play whole episodes with a checkpoint's policy, in this process.

    Returns arrays over exactly `episodes` episodes: episode_return, episode_cost (true), episode_length and
    episode_model_cost (sum of the learned cost; zeros without one).
    """
    sums: dict[str, list[float]] = {
        f"episode_{name}": [] for name in ("return", "cost", "length", "model_cost")
    }
    for rollout, e in _episodes(cfg, state, episodes, deterministic, seed):
        sums["episode_length"].append(float(len(e)))
        for name, values in (
            ("return", rollout.rewards),
            ("cost", rollout.costs),
            ("model_cost", rollout.model_cost),
        ):
            sums[f"episode_{name}"] += list(rollout.episode_sums(values, [e]))
    return {name: np.array(values) for name, values in sums.items()}


def play(
    cfg: Any, state: dict[str, Any], *, episodes: int, deterministic: bool, seed: int
) -> list[dict[str, Any]]:
    """Exactly `episodes` whole episodes of a checkpoint's policy, each as arrays by name.

    obs (L, D), actions (L, A) as executed, rewards (L,), costs (L,; true), and terminated: a bool.
    """
    found: list[dict[str, Any]] = []
    for rollout, e in _episodes(cfg, state, episodes, deterministic, seed):
        assert rollout.costs is not None
        arrays = {
            "obs": rollout.obs,
            "actions": rollout.executed,
            "rewards": rollout.rewards,
            "costs": rollout.costs,
        }
        steps = {name: values[e.start : e.end, e.env].copy() for name, values in arrays.items()}
        found.append({**steps, "terminated": e.terminated})
    return found


def _episodes(
    cfg: Any, state: dict[str, Any], episodes: int, deterministic: bool, seed: int
) -> Iterator[tuple[Rollout, Episode]]:
    """Whole episodes, each in its rollout, played in this process."""
    from rollouts.collect import EVALUATION_STREAM, collect

    _at_least("episodes", episodes, 1)
    actor = load_actor(cfg, state)
    envs = [make_env(cfg.env) for _ in range(min(cfg.rollout.num_envs, episodes))]
    iteration, left = 0, episodes
    while left:
        rollout = collect(
            envs,
            actor.policy,
            actor.cost_model,
            steps=cfg.env.horizon,
            seed=seed,
            iteration=iteration,
            deterministic=deterministic,
            stream=EVALUATION_STREAM,
        )
        iteration += 1
        # One episode an environment: later ones in the same window would favour short episodes.
        firsts = [e for e in rollout.episodes() if e.start == 0][:left]
        left -= len(firsts)
        yield from ((rollout, e) for e in firsts)
    for env in envs:
        env.close()


def render_episode(
    cfg: Any,
    state: dict[str, Any],
    *,
    seed: int,
    deterministic: bool,
    max_frames: int,
    width: int = 320,
    height: int = 240,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One episode as frames (F, height, width, 3) uint8, evenly spaced, and its trace.

    The trace holds `frame_step` (F,), and per step `reward`, `cost` and `model_cost` (T,). Needs MUJOCO_GL
    set to a headless backend before MuJoCo is imported.
    """
    from rollouts.collect import EVALUATION_STREAM, collect

    actor = load_actor(cfg, state)
    env = _Recorder(
        make_env(cfg.env, render_mode="rgb_array"), max(1, cfg.env.horizon // max_frames), width, height
    )
    rollout = collect(
        [env],
        actor.policy,
        actor.cost_model,
        steps=cfg.env.horizon,
        seed=seed,
        iteration=0,
        deterministic=deterministic,
        stream=EVALUATION_STREAM,
    )
    env.close()
    end = len(rollout.episodes()[0])
    assert rollout.costs is not None
    trace = {
        "frame_step": np.array([s for s in env.steps_shown if s <= end]),
        "reward": rollout.rewards[:end, 0],
        "cost": rollout.costs[:end, 0],
        "model_cost": rollout.model_cost[:end, 0],
    }
    return np.stack(env.frames[: len(trace["frame_step"])]), trace


class _Recorder:
    """An environment that keeps every k-th frame of its first episode, shrunk by picking pixels."""

    def __init__(self, env: Any, every: int, width: int, height: int):
        self.env, self.every, self.size = env, every, (height, width)
        self.frames: list[np.ndarray] = []
        self.steps_shown: list[int] = []
        self._step, self._episode = 0, 0

    def reset(self, **kwargs: Any):
        out = self.env.reset(**kwargs)
        self._step, self._episode = 0, self._episode + 1
        self._shoot()
        return out

    def step(self, action: np.ndarray):
        out = self.env.step(action)
        self._step += 1
        if self._step % self.every == 0:
            self._shoot()
        return out

    def _shoot(self) -> None:
        if self._episode == 1:
            frame = self.env.render()
            rows = np.linspace(0, frame.shape[0] - 1, self.size[0]).astype(int)
            columns = np.linspace(0, frame.shape[1] - 1, self.size[1]).astype(int)
            self.frames.append(frame[rows][:, columns])
            self.steps_shown.append(self._step)

    def close(self) -> None:
        self.env.close()
