"""The PPO-Lagrangian loss of one minibatch, row by row in NumPy float64, and its numerical gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def perceptron(arrays: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """Weights and biases alternating, tanh between the layers, none after the last."""
    for i in range(0, len(arrays), 2):
        x = arrays[i] @ x + arrays[i + 1]
        if i + 2 < len(arrays):
            x = np.tanh(x)
    return x


def loss(nets: dict[str, list[np.ndarray]], rows: dict[str, np.ndarray], config, obs_dim: int) -> float:
    """nets: actor, log_std, reward_critic, cost_critic (or without); rows: the minibatch's columns."""
    n = len(rows["actions"])
    log_std = nets["log_std"][0]
    gain = value = cost_value = 0.0
    for i in range(n):
        x, u = rows["inputs"][i], rows["actions"][i]
        mean = perceptron(nets["actor"], x)
        if config.squash_mean:
            mean = np.tanh(mean)
        density = np.prod(
            np.exp(-((u - mean) ** 2) / (2 * np.exp(log_std) ** 2)) / (np.exp(log_std) * np.sqrt(2 * np.pi))
        )
        ratio = density / np.exp(rows["log_prob"][i])
        a = rows["advantage"][i]
        clipped = min(max(ratio, 1 - config.clip), 1 + config.clip)
        gain += min(ratio * a, clipped * a) / n
        value += (perceptron(nets["reward_critic"], x[:obs_dim])[0] - rows["reward_target"][i]) ** 2 / n
        if "cost_critic" in nets:
            cost_value += (perceptron(nets["cost_critic"], x)[0] - rows["cost_target"][i]) ** 2 / n
    # The entropy of a Gaussian: 1/2 log(2 pi e sigma^2) per dimension.
    entropy = sum(0.5 * np.log(2 * np.pi * np.e * np.exp(2 * s)) for s in log_std)
    total = -gain + config.value_coef * (value + cost_value) - config.entropy_coef * entropy
    for name, weight in (("reward_critic", config.critic_l2), ("cost_critic", config.cost_critic_l2)):
        for array in nets.get(name, []):
            total += weight * (array**2).sum()
    return float(total)


def numerical_gradient(f: Callable[[], float], array: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of f with respect to `array`, changed in place and put back."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        above = f()
        array[index] = kept - step
        below = f()
        array[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient
