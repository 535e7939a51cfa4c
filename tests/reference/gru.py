"""The violation estimator on one trajectory in plain Python floats, written from the GRU's equations.

r = s(W_ir x + b_ir + W_hr h + b_hr), z likewise, n = tanh(W_in x + b_in + r (W_hn h + b_hn)),
h' = (1 - z) n + z h (Cho et al. 2014, in the form of torch.nn.GRU). No arrays, no batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = list[float]


def affine(weight: Sequence[Sequence[float]], bias: Sequence[float], x: Sequence[float]) -> Vector:
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def gru_step(w_ih, w_hh, b_ih, b_hh, x: Vector, h: Vector) -> Vector:
    """One layer's next state; weights as torch stacks them: reset, update, candidate."""
    n = len(h)
    gi, gh = affine(w_ih, b_ih, x), affine(w_hh, b_hh, h)
    r = [sigmoid(gi[i] + gh[i]) for i in range(n)]
    z = [sigmoid(gi[n + i] + gh[n + i]) for i in range(n)]
    candidate = [math.tanh(gi[2 * n + i] + r[i] * gh[2 * n + i]) for i in range(n)]
    return [(1.0 - z[i]) * candidate[i] + z[i] * h[i] for i in range(n)]


def credits(state: dict[str, list], config, inputs: Sequence[Sequence[float]]):
    """(mean credit, variance, all layers' states after the step) at every step of one episode.

    `state` is the estimator's state dict as nested lists.
    """
    layers, size = config.layers, config.hidden_size
    h = [[0.0] * size for _ in range(layers)]
    out = []
    for raw in inputs:
        x = [
            min(8.0, max(-8.0, (v - m) / s))
            for v, m, s in zip(raw, state["input_mean"], state["input_std"], strict=True)
        ]
        before = h[-1]
        following = []
        for layer in range(layers):
            weights = [state[f"gru.{name}_l{layer}"] for name in ("weight_ih", "weight_hh")]
            biases = [state[f"gru.{name}_l{layer}"] for name in ("bias_ih", "bias_hh")]
            x = gru_step(*weights, *biases, x, h[layer])
            following.append(x)
        h = following
        u = before + h[-1]
        for i in (0, 2):
            u = [max(0.0, v) for v in affine(state[f"decoder.{i}.weight"], state[f"decoder.{i}.bias"], u)]
        location = affine(state["location.weight"], state["location.bias"], u)[0]
        if config.head == "point":
            mean, var = min(7.0, max(0.0, location)), 0.0
        else:
            mu = min(3.0, max(-20.0, location - config.loc_offset))
            raw_scale = affine(state["log_scale.weight"], state["log_scale.bias"], u)[0]
            sigma = math.exp(min(2.0, max(-20.0, raw_scale - config.log_std_offset)))
            mean = min(7.0, math.exp(mu + sigma**2 / 2))
            var = min(49.0, (math.exp(sigma**2) - 1.0) * math.exp(2 * mu + sigma**2))
        out.append((mean, var, [v for layer in h for v in layer]))
    return out
