"""Intervals against printed tables and against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluators.statistics import mean_summary, rate_summary, student_quantile

# Two-sided 95 % points of Student's t, as every table prints them.
T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "expected"), T_TABLE.items())
def test_student_quantile_matches_the_table(degrees: int, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-4)


def test_student_quantile_closed_forms() -> None:
    p = 0.9
    assert student_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
    alpha = 4 * p * (1 - p)
    assert student_quantile(p, 2) == pytest.approx(2 * (p - 0.5) * math.sqrt(2 / alpha), rel=1e-9)
    assert student_quantile(0.5, 7) == pytest.approx(0.0, abs=1e-12)
    assert student_quantile(0.025, 7) == pytest.approx(-student_quantile(0.975, 7), rel=1e-9)
    assert student_quantile(0.975, 100_000) == pytest.approx(1.959988, abs=2e-6)


def test_mean_summary_by_hand() -> None:
    # mean 3, squared deviations 4+1+0+1+4 = 10, s = sqrt(2.5), half width 2.776 * sqrt(2.5 / 5) = 1.963
    summary = mean_summary([1, 2, 3, 4, 5])
    assert summary["mean"] == 3.0
    assert summary["n"] == 5
    assert summary["ci95"] == pytest.approx([1.037, 4.963], abs=1e-3)


def test_mean_of_one_value_has_no_interval() -> None:
    assert mean_summary([2.5]) == {"mean": 2.5, "ci95": None, "n": 1}


def test_mean_interval_covers_as_promised() -> None:
    rng = np.random.default_rng(0)
    covered = sum(
        low <= 1.0 <= high
        for low, high in (mean_summary(rng.normal(1.0, 2.0, 8))["ci95"] for _ in range(2000))
    )
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_wilson_interval_of_published_examples() -> None:
    # 81 successes in 263 trials: Newcombe (1998), method 3, prints 0.2553 to 0.3662.
    assert rate_summary([1] * 81 + [0] * 182)["ci95"] == pytest.approx([0.2553, 0.3662], abs=5e-5)
    # 0 of 20 and 1 of 29, same table.
    assert rate_summary([0] * 20)["ci95"] == pytest.approx([0.0, 0.1611], abs=5e-5)
    assert rate_summary([1] + [0] * 28)["ci95"] == pytest.approx([0.0061, 0.1718], abs=5e-5)


def test_rate_at_the_ends_and_mirrored() -> None:
    # All of n: the lower end is n / (n + z^2).
    summary = rate_summary(np.ones(10, bool))
    assert summary["mean"] == 1.0
    assert summary["ci95"] == pytest.approx([10 / (10 + 1.959964**2), 1.0], abs=1e-6)
    assert rate_summary([0] * 10)["ci95"] == pytest.approx([1 - x for x in reversed(summary["ci95"])])


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [[1.0, 2.0]]])
def test_bad_values_are_refused(bad: list) -> None:
    with pytest.raises(ValueError, match="finite"):
        mean_summary(bad)


def test_a_rate_takes_booleans_only() -> None:
    with pytest.raises(ValueError, match="booleans"):
        rate_summary([0.5, 1.0])
