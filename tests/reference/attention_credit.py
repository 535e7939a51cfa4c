"""Attention credit, dense and slow: whole maps in float64, loops as the paper's text has them."""

from __future__ import annotations

import numpy as np


def span(maps: np.ndarray, start: int, end: int) -> np.ndarray:
    """d of every head: maps (H, N, N), response [start, end)."""
    return np.array(
        [np.mean([sum(a[t, s] * (t - s) for s in range(t + 1)) for t in range(start, end)]) for a in maps]
    )


def waad(a: np.ndarray, start: int, end: int, window: int) -> np.ndarray:
    """WAAD of a map (N, N) for the response's tokens."""
    return np.array([sum(a[t, s] * min(t - s, window) for s in range(t + 1)) for t in range(start, end)])


def fai(a: np.ndarray, start: int, end: int, low: int, high: int) -> np.ndarray:
    """FAI of a map (N, N) for the response's tokens; 0 without a future."""
    found = []
    for s in range(start, end):
        later = [t for t in range(start, end) if s + low <= t <= min(end - 1, s + high)]
        found.append(np.mean([a[t, s] for t in later]) if later else 0.0)
    return np.array(found)


def coupled(w: np.ndarray, f: np.ndarray, q: float, amplification: float, alpha: float, k: int) -> np.ndarray:
    """Factors of the coupled rhythm, token by token."""
    n = len(w)
    size = int(np.ceil(q * n - 1e-9))
    delta = [abs(w[t] - w[t + 1]) if t + 1 < n else 0.0 for t in range(n)]
    t_loc = set(sorted(range(n), key=lambda t: (-delta[t], t))[:size])
    t_glob = set(sorted(range(n), key=lambda t: (-f[t], t))[:size])
    d, intro = set(), set()
    for s in t_glob:
        before = [u for u in range(s - k, s) if u >= 0]
        if w[s] <= np.median(w) and any(u in t_loc for u in before):
            d.add(s)
            intro.add(max(before, key=lambda u: (delta[u], u)))
    extra = amplification - 1
    return np.array(
        [
            1
            + extra * (t in t_glob and t not in d)
            + (1 - alpha) * extra * (t in d)
            + alpha * extra * (t in intro)
            for t in range(n)
        ]
    )
