"""The mathematics of PPO and PPO-Lagrangian: advantages, the mixed objective, one fused update.

Torch and NumPy only; who holds the parameters and where they live is `trainers.control_learner`'s business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    done: np.ndarray,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """Generalised advantage estimates A_t = sum_k (gamma lam)^k delta_{t+k}, cut where `done`.

    delta_t = r_t + gamma next_values_t - values_t, all (T, N). `next_values` is 0 after a termination and
    the value of the episode's own last state after a time-out (Schulman et al. 2016, eq. 16).
    """
    delta = rewards + gamma * next_values - values
    keep = gamma * lam * ~done
    advantages = np.zeros_like(delta)
    carry = np.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        carry = delta[t] + keep[t] * carry
        advantages[t] = carry
    return advantages


def mixed_advantage(
    reward_advantage: np.ndarray,
    cost_advantage: np.ndarray | None,
    multiplier: float,
    standardize_cost: bool,
) -> np.ndarray:
    """A = (A_r - lambda A_c) / (1 + lambda): A_r standardised, A_c centred.

    With `standardize_cost` A_c is also divided by max(std, 0.1); the floor keeps noise small where no
    step costs anything.
    """
    a_r = (reward_advantage - reward_advantage.mean()) / (reward_advantage.std() + 1e-8)
    if cost_advantage is None:
        return a_r
    a_c = cost_advantage - cost_advantage.mean()
    if standardize_cost:
        a_c = a_c / max(a_c.std(), 0.1)
    return (a_r - multiplier * a_c) / (1.0 + multiplier)


class ActorCritics(nn.Module):
    """Gaussian actor, reward critic and (optionally) cost critic, three separate perceptrons.

    Actor and cost critic read [observation; memory]; the reward critic reads the observation alone. The
    memory columns start at zero and are drawn from no generator: a memory that is switched on later does not
    move the policy, and until then training is PPO's to the last bit.
    """

    def __init__(self, obs_dim: int, memory_dim: int, action_dim: int, config, cost_critic: bool):
        super().__init__()
        self.obs_dim, self.squash = obs_dim, config.squash_mean
        sizes, activation = config.hidden_sizes, {"tanh": nn.Tanh, "relu": nn.ReLU}[config.activation]
        self.actor = _mlp(obs_dim, sizes, action_dim, activation)
        self.log_std = nn.Parameter(torch.full((action_dim,), config.log_std_init))
        self.reward_critic = _mlp(obs_dim, sizes, 1, activation)
        self.cost_critic = _mlp(obs_dim, sizes, 1, activation) if cost_critic else None
        with torch.no_grad():
            last = linear_layers(self.actor)[-1]
            last.weight.mul_(0.05)
            last.bias.zero_()
            for net in (self.actor, self.cost_critic):
                if net is not None and memory_dim:
                    first = linear_layers(net)[0]
                    columns = torch.zeros(first.out_features, memory_dim)
                    first.weight = nn.Parameter(torch.cat([first.weight, columns], dim=1))
                    first.in_features += memory_dim

    def mean(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, D + M) -> mean action (B, A), in units of half the action range."""
        out = self.actor(inputs)
        return torch.tanh(out) if self.squash else out

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Log density (B,) of unclipped actions (B, A)."""
        z = (actions - self.mean(inputs)) * torch.exp(-self.log_std)
        return (-0.5 * z * z - self.log_std - LOG_SQRT_2PI).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Entropy of the Gaussian, the same in every state."""
        return (self.log_std + 0.5 + LOG_SQRT_2PI).sum()


def _mlp(inputs: int, hidden: list[int], outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def policy_arrays(nets: ActorCritics, obs_norm, spec, config) -> dict:
    """The actor as the keyword arguments of `rollouts.collect.GaussianPolicy` (copies, float32)."""
    linear = linear_layers(nets.actor)
    mean, std = (obs_norm.mean, obs_norm.std) if config.normalize_obs else (0.0, 1.0)
    shape = (spec.obs_dim,)
    return {
        "layers": [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in linear],
        "log_std": nets.log_std.detach().numpy().copy(),
        "obs_mean": np.broadcast_to(np.asarray(mean, np.float32), shape).copy(),
        "obs_std": np.broadcast_to(np.asarray(std, np.float32), shape).copy(),
        "action_low": spec.action_low,
        "action_high": spec.action_high,
        "activation": config.activation,
        "squash_mean": config.squash_mean,
    }


def linear_layers(net: nn.Module) -> list[nn.Linear]:
    """The linear layers of a perceptron, input first."""
    return [m for m in net.modules() if isinstance(m, nn.Linear)]


@dataclass
class Columns:
    """One iteration's training data, flat over steps: B = T * N rows, float32."""

    inputs: torch.Tensor  # (B, D + M)
    actions: torch.Tensor  # (B, A)
    log_prob: torch.Tensor  # (B,), of the acting policy
    advantage: torch.Tensor  # (B,)
    reward_target: torch.Tensor  # (B,)
    cost_target: torch.Tensor | None  # (B,)


def ppo_update(
    nets: ActorCritics, optimizer: torch.optim.Optimizer, data: Columns, config, generator: torch.Generator
) -> dict[str, float]:
    """`config.epochs` passes of minibatches over `data`, in place. Returns the update's statistics.

    Per minibatch: L = -E[min(rho A, clip(rho, 1 +- clip) A)] - entropy_coef H
    + value_coef (E[(V - R)^2] + E[(V_c - C)^2]) + L2 of the critics (Schulman et al. 2017, eq. 7 and 9).
    Once the mean of rho - 1 - log rho over all rows passes `target_kl`, nothing more is learned in this
    iteration. A row too few for a whole minibatch waits for the next pass's shuffle.
    """
    rows, size = len(data.actions), min(config.minibatch_steps, len(data.actions))
    d, a = data.inputs.shape[1], data.actions.shape[1]
    columns = [data.inputs, data.actions, data.log_prob[:, None], data.advantage[:, None]]
    columns += [data.reward_target[:, None]]
    columns += [data.cost_target[:, None]] if data.cost_target is not None else []
    packed = torch.cat(columns, dim=1)  # one gather per pass instead of six
    actor_params = [*nets.actor.parameters(), nets.log_std]
    kl, clipped, grad_norm, steps, epochs = 0.0, 0.0, 0.0, 0, 0
    for _ in range(config.epochs):
        epochs += 1
        shuffled = packed[torch.randperm(rows, generator=generator)]
        for start in range(0, rows - size + 1, size):
            batch = shuffled[start : start + size]
            x, u = batch[:, :d], batch[:, d : d + a]
            old, adv, target = batch[:, d + a], batch[:, d + a + 1], batch[:, d + a + 2]
            ratio = torch.exp(nets.log_prob(x, u) - old)
            gain = torch.min(ratio * adv, ratio.clamp(1 - config.clip, 1 + config.clip) * adv)
            loss = config.value_coef * (nets.reward_critic(x[:, : nets.obs_dim])[:, 0] - target).pow(2).mean()
            loss = loss - gain.mean()
            if config.entropy_coef:
                loss = loss - config.entropy_coef * nets.entropy()
            if nets.cost_critic is not None:
                error = nets.cost_critic(x)[:, 0] - batch[:, d + a + 3]
                loss = loss + config.value_coef * error.pow(2).mean()
            loss = loss + _l2(nets.reward_critic, config.critic_l2)
            loss = loss + _l2(nets.cost_critic, config.cost_critic_l2)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(actor_params, config.max_grad_norm)
            optimizer.step()
            steps += 1
            with torch.no_grad():
                nets.log_std.clamp_(config.log_std_min, config.log_std_max)
        with torch.no_grad():
            log_ratio = nets.log_prob(data.inputs, data.actions) - data.log_prob
            ratio = log_ratio.exp()
            kl = float((ratio - 1.0 - log_ratio).mean())
            clipped = float(((ratio - 1.0).abs() > config.clip).float().mean())
            grad_norm = float(norm)
        if config.target_kl is not None and kl > config.target_kl:
            break
    return {
        "loss": float(loss.detach()),
        "kl": kl,
        "clip_fraction": clipped,
        "grad_norm": grad_norm,
        "gradient_steps": steps,
        "epochs": epochs,
        "policy_std": float(nets.log_std.detach().exp().mean()),
    }


def _l2(critic: nn.Module | None, coefficient: float) -> torch.Tensor | float:
    if critic is None or not coefficient:
        return 0.0
    return coefficient * sum(p.pow(2).sum() for p in critic.parameters())
