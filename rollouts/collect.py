"""The control rollout loop: environments, a NumPy policy and an optional cost model, one step at a time.

Pure of Ray and torch: a remote env runner, the driver and the evaluator all call `collect`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from envs.errors import UserError
from rollouts.trajectories import Rollout

OBS_CLIP = 5.0  # normalised observations are clipped to +-5 standard deviations
ROLLOUT_STREAM, EVALUATION_STREAM = 0, 1  # first word of the seed sequences: never the same noise twice


class Interrupted(Exception):
    """Collecting was asked to stop in the middle; what it had is gone, and it can be drawn again."""


class CostModel(Protocol):
    """A learned cost with a memory h (n, M) per environment; M may be 0. Read-only during a rollout."""

    def init(self, n: int) -> np.ndarray: ...

    def step(
        self, obs: np.ndarray, action: np.ndarray, h: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Raw observation (n, D), executed action (n, A), h -> mean cost (n,), variance (n,), next h."""
        ...

    def augment(self, obs: np.ndarray, h: np.ndarray) -> np.ndarray:
        """Normalised observation (..., D) and h (..., M) -> what actor and cost critic read."""
        ...


class NoCostModel:
    """No learned cost and no memory: plain observations reach the policy."""

    def init(self, n: int) -> np.ndarray:
        return np.zeros((n, 0), np.float32)

    def step(self, obs: np.ndarray, action: np.ndarray, h: np.ndarray):
        zero = np.zeros(len(obs), np.float32)
        return zero, zero, h

    def augment(self, obs: np.ndarray, h: np.ndarray) -> np.ndarray:
        return obs


@dataclass(kw_only=True)
class GaussianPolicy:
    """A multilayer perceptron's Gaussian policy in NumPy: the runner's copy of the learner's actor.

    layers: [(weight (out, in), bias (out,)), ...]; log_std (A,); obs_mean, obs_std (D,).
    """

    layers: list[tuple[np.ndarray, np.ndarray]]
    log_std: np.ndarray
    obs_mean: np.ndarray
    obs_std: np.ndarray
    action_low: np.ndarray
    action_high: np.ndarray
    activation: str = "tanh"
    squash_mean: bool = True

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """Observation (..., D) in running standard deviations, clipped to +-OBS_CLIP, float32."""
        return np.clip((obs - self.obs_mean) / self.obs_std, -OBS_CLIP, OBS_CLIP).astype(np.float32)

    def mean(self, inputs: np.ndarray) -> np.ndarray:
        """Mean action (n, A) for actor inputs (n, D + memory), in units of half the action range."""
        x = inputs
        for weight, bias in self.layers[:-1]:
            x = x @ weight.T
            x += bias
            x = np.tanh(x, out=x) if self.activation == "tanh" else np.maximum(x, 0.0, out=x)
        weight, bias = self.layers[-1]
        x = x @ weight.T + bias
        return np.tanh(x) if self.squash_mean else x

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Clip to [-1, 1] and scale to the environment's action range."""
        unit = (np.clip(action, -1.0, 1.0) + 1.0) * 0.5
        return self.action_low + unit * (self.action_high - self.action_low)


def collect(
    envs: Sequence[Any],
    policy: GaussianPolicy,
    cost_model: CostModel,
    *,
    steps: int,
    seed: int,
    iteration: int,
    first_env: int = 0,
    version: tuple[int, int] = (0, 0),
    deterministic: bool = False,
    stream: int = ROLLOUT_STREAM,
    should_stop: Callable[[], Any] = lambda: None,
) -> Rollout:
    """Reset every environment and take `steps` steps in each.

    Environment e's reset and noise come from a generator seeded by (stream, seed, iteration, first_env + e)
    alone, so what it draws depends neither on its neighbours nor on earlier iterations.
    deterministic=True plays the mean action. Raises UserError when the environment returns NaN, and
    Interrupted once `should_stop()` is true.
    """
    n = len(envs)
    action_dim = len(policy.log_std)
    generators = [np.random.default_rng((stream, seed, iteration, first_env + e)) for e in range(n)]
    first = [env.reset(seed=int(g.integers(2**31)))[0] for env, g in zip(envs, generators)]
    noise = np.stack([g.standard_normal((steps, action_dim), np.float32) for g in generators], axis=1)
    noise *= np.exp(policy.log_std).astype(np.float32)
    if deterministic:
        noise[:] = 0.0
    obs = np.empty((steps + 1, n, len(first[0])), np.float32)
    obs[0] = first
    h = cost_model.init(n)
    memory = np.empty((steps + 1, n, h.shape[1]), np.float32)
    memory[0] = h
    actions, means, executed = (np.empty((steps, n, action_dim), np.float32) for _ in range(3))
    rewards, costs, model_cost, model_cost_var = (np.empty((steps, n), np.float32) for _ in range(4))
    terminated, truncated = (np.zeros((steps, n), bool) for _ in range(2))
    final_index, final_obs, final_memory = [], [], []
    for t in range(steps):
        if should_stop():
            raise Interrupted
        means[t] = policy.mean(cost_model.augment(policy.normalize(obs[t]), h))
        actions[t] = means[t] + noise[t]
        executed[t] = policy.to_env(actions[t])
        model_cost[t], model_cost_var[t], h = cost_model.step(obs[t], executed[t], h)
        sent = executed[t].copy()  # an environment may keep its action, and change it
        for e, env in enumerate(envs):
            o, rewards[t, e], terminated[t, e], truncated[t, e], info = env.step(sent[e])
            costs[t, e] = info["cost"]
            if terminated[t, e] or truncated[t, e]:
                final_index.append((t, e))
                final_obs.append(np.array(o, np.float32))  # a copy: reset may reuse the buffer
                final_memory.append(h[e].copy())
                o = env.reset()[0]
                h[e] = cost_model.init(1)[0]
            obs[t + 1, e] = o
        memory[t + 1] = h
    rollout = Rollout(
        obs=obs,
        memory=memory,
        actions=actions,
        means=means,
        executed=executed,
        rewards=rewards,
        costs=costs,
        terminated=terminated,
        truncated=truncated,
        model_cost=model_cost,
        model_cost_var=model_cost_var,
        final_index=np.array(final_index, np.int64).reshape(-1, 2),
        final_obs=np.array(final_obs, np.float32).reshape(len(final_index), obs.shape[-1]),
        final_memory=np.array(final_memory, np.float32).reshape(len(final_index), memory.shape[-1]),
        version=version,
    )
    _check_finite(rollout, iteration, first_env)
    return rollout


def _check_finite(rollout: Rollout, iteration: int, first_env: int) -> None:
    """Name the first tensor and step that is not a finite number, and who made it."""
    makers = {
        "actions": "the policy",
        "model_cost": "the cost model",
        "model_cost_var": "the cost model",
        "memory": "the cost model",
        "obs": "the environment",
        "rewards": "the environment",
        "costs": "the environment",
        "final_obs": "the environment",
        "final_memory": "the cost model",
    }
    bad = []
    for name, maker in makers.items():
        values = getattr(rollout, name)
        if not np.isfinite(values).all():
            at = np.argwhere(~np.isfinite(values))[0]
            last = name.startswith("final")  # these follow the step that ended the episode
            step, env = rollout.final_index[at[0]] if last else at[:2]
            bad.append((int(step) + last, name, maker, int(env), values[tuple(at)]))
    if bad:
        # What breaks first is the cause: the environment's obs of step t+1 come after the step's own values.
        order = {"obs": 0, "memory": 1, "actions": 2}
        step, name, maker, env, value = min(bad, key=lambda b: (b[0], order.get(b[1], 3)))
        raise UserError(
            f"{maker} returned a number that is not finite: {name} at step {step} of environment "
            f"{first_env + env}, iteration {iteration}",
            given=str(value),
            allowed="finite numbers",
            fix="look at this step of the environment (bounded rewards?), or lower the learning rates",
        )
