"""Summaries of repeated measurements: a mean or a rate, each with its 95 % confidence interval.

Plain NumPy on arrays of shape (n,); nothing here knows where the numbers come from.
"""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike


class Summary(TypedDict):
    """ci95 is None where n is too small to say anything (fewer than two values)."""

    mean: float
    ci95: list[float] | None
    n: int


NORMAL_975 = 1.959963984540054  # the standard normal's 0.975 quantile


def mean_summary(values: ArrayLike) -> Summary:
    """Mean of independent values (n,) with Student's interval mean +- t_{0.975, n-1} s / sqrt(n).

    Exact for normal data; for skewed data right only for large n. ValueError for no or non-finite values.
    """
    x = _checked(values)
    n = len(x)
    mean = float(x.mean())
    if n < 2:
        return {"mean": mean, "ci95": None, "n": n}
    half = student_quantile(0.975, n - 1) * float(x.std(ddof=1)) / math.sqrt(n)
    return {"mean": mean, "ci95": [mean - half, mean + half], "n": n}


def rate_summary(events: ArrayLike) -> Summary:
    """Share of true values among (n,) booleans with Wilson's score interval.

    Unlike the interval around the observed share, it stays inside [0, 1] and has a width at 0 and at 1
    (Wilson 1927; Brown, Cai and DasGupta 2001).
    """
    x = _checked(events)
    if not np.isin(x, (0.0, 1.0)).all():
        raise ValueError("rate_summary takes booleans")
    n = len(x)
    p = float(x.mean())
    z2 = NORMAL_975**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_975 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low = 0.0 if p == 0.0 else centre - half
    high = 1.0 if p == 1.0 else centre + half
    return {"mean": p, "ci95": [low, high], "n": n}


def student_quantile(p: float, degrees: int) -> float:
    """Quantile t of Student's distribution: P(T <= t) = p, for 0 < p < 1 and degrees >= 1, to about 1e-9.

    Bisection on the distribution function, which for whole degrees of freedom is a finite sum in
    theta = atan(t / sqrt(degrees)) (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    """
    if not (0.0 < p < 1.0 and degrees >= 1):
        raise ValueError(f"student_quantile needs 0 < p < 1 and degrees >= 1, not p={p}, degrees={degrees}")
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        if _student_cdf(theta, degrees) < p:
            low = theta
        else:
            high = theta
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _student_cdf(theta: float, degrees: int) -> float:
    sin, cos = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term, total = (cos, cos) if odd else (1.0, 1.0)
    if degrees == 1:
        total = 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    area = 2 / math.pi * (theta + sin * total) if odd else sin * total  # P(|T| <= t), signed
    return (1 + area) / 2


def _checked(values: ArrayLike) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0 or not np.isfinite(x).all():
        raise ValueError(f"expected a non-empty vector of finite values, got shape {x.shape}")
    return x
