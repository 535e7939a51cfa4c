"""The simulated annotator, the prefixes it is shown and the count of its answers."""

from __future__ import annotations

import numpy as np
import pytest

from envs.errors import UserError
from rewards.labels import QueryCounter, ThresholdOracle, prefix_ends


def label(
    oracle: ThresholdOracle, costs: np.ndarray, slice_steps: int, terminated: bool = False, seed: int = 0
):
    ends = prefix_ends(len(costs), slice_steps)
    return oracle.label(costs, ends, terminated, np.random.default_rng(seed))


def crossing_at(step: int | None, length: int = 60, budget: int = 5) -> np.ndarray:
    """Cost 1 on the first `budget` steps, and once more on `step` (counted from 1), which crosses."""
    costs = np.zeros(length, np.float32)
    costs[:budget] = 1.0
    if step is not None:
        costs[step - 1] += 1.0
    return costs


@pytest.mark.parametrize(
    ("length", "slice_steps", "ends"),
    [
        (60, 20, [20, 40, 60]),  # the whole is the last, not a fourth
        (61, 20, [20, 40, 60, 61]),
        (59, 20, [20, 40, 59]),
        (20, 20, [20]),
        (7, 20, [7]),
        (3, 1, [1, 2, 3]),
        (1, 1, [1]),
    ],
)
def test_prefix_ends(length: int, slice_steps: int, ends: list[int]) -> None:
    np.testing.assert_array_equal(prefix_ends(length, slice_steps), ends)


def test_an_empty_trajectory_is_refused() -> None:
    with pytest.raises(UserError, match="empty trajectory"):
        prefix_ends(0, 20)


def test_at_most_the_budget_is_safe() -> None:
    costs = np.array([1.0, 0.5, 0.5, 0.25, 0.0])
    # Sums 1, 1.5, 2, 2.25, 2.25 against a budget of 2.
    np.testing.assert_array_equal(label(ThresholdOracle(2.0), costs, 1), [1, 1, 1, 0, 0])
    assert label(ThresholdOracle(2.0), costs, 1).dtype == np.float32


def test_once_unsafe_always_unsafe() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        labels = label(ThresholdOracle(3.0), rng.random(20), 3)
        assert (np.diff(labels) <= 0).all()


def test_termination_makes_the_whole_unsafe_and_no_prefix() -> None:
    costs = np.zeros(50)
    np.testing.assert_array_equal(label(ThresholdOracle(5.0), costs, 20), [1, 1, 1])
    np.testing.assert_array_equal(label(ThresholdOracle(5.0), costs, 20, terminated=True), [1, 1, 0])
    np.testing.assert_array_equal(label(ThresholdOracle(5.0), costs[:40], 20, terminated=True), [1, 0])


def test_float32_costs_are_summed_in_double_precision() -> None:
    costs = np.full(2**25 // 2**10, 2.0**-14, np.float32)  # 32768 times 2^-14 is 2 exactly
    costs[0] += 2.0**11  # in float32 later additions of 2^-14 to 2^11 would be lost
    assert label(ThresholdOracle(2.0**11 + 2.0), costs, len(costs))[0] == 1
    assert label(ThresholdOracle(2.0**11 + 1.9), costs, len(costs))[0] == 0


def test_noise_flips_each_label_independently() -> None:
    q, n = 0.2, 4000
    oracle, rng = ThresholdOracle(5.0, noise=q), np.random.default_rng(0)
    ends = prefix_ends(60, 20)
    truth = np.array([1, 0, 0])
    flips = np.array([oracle.label(crossing_at(30), ends, False, rng) != truth for _ in range(n)])
    # Four standard deviations of a mean of n: 0.025 for a single rate, 0.018 for a joint one.
    np.testing.assert_allclose(flips.mean(0), q, atol=4 * np.sqrt(q * (1 - q) / n))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        joint = (flips[:, i] & flips[:, j]).mean()
        assert joint == pytest.approx(q * q, abs=4 * np.sqrt(q**2 * (1 - q**2) / n))


def test_labels_come_from_the_generator_alone() -> None:
    oracle = ThresholdOracle(5.0, noise=0.3)
    same = [label(oracle, crossing_at(30), 1, seed=7) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    assert (same[0] != label(oracle, crossing_at(30), 1, seed=8)).any()


@pytest.mark.parametrize("noise", [-0.1, 0.5, 1.0, float("nan")])
def test_noise_outside_its_range_is_refused(noise: float) -> None:
    with pytest.raises(UserError, match=r"algo\.noise") as caught:
        ThresholdOracle(5.0, noise)
    assert "[0, 0.5)" in str(caught.value)


@pytest.mark.parametrize("budget", [-1.0, float("nan")])
def test_a_budget_that_is_no_amount_is_refused(budget: float) -> None:
    with pytest.raises(UserError, match="budget"):
        ThresholdOracle(budget)


@pytest.mark.parametrize(
    ("crossing", "code", "minimal", "labels"),
    [
        (None, 3, 1, [1, 1, 1]),  # 1 + prefixes 20 and 40
        (30, 2, 2, [1, 0, 0]),  # 1 + prefix 20
        (6, 1, 1, [0, 0, 0]),
    ],
)
def test_query_counter_on_60_steps_with_slice_20(crossing, code, minimal, labels) -> None:
    answers = label(ThresholdOracle(5.0), crossing_at(crossing), 20)
    np.testing.assert_array_equal(answers, labels)
    counter = QueryCounter()
    counter.add(answers)
    assert counter == QueryCounter(trajectories=1, code=code, minimal=minimal)


def test_query_counter_crossing_at_5() -> None:
    costs = crossing_at(5, budget=4)
    answers = label(ThresholdOracle(4.0), costs, 20)
    counter = QueryCounter()
    counter.add(answers)
    assert (len(answers), counter.code) == (3, 1)


def test_query_counter_adds_up() -> None:
    counter = QueryCounter()
    for crossing in (None, 30, 6):
        counter.add(label(ThresholdOracle(5.0), crossing_at(crossing), 20))
    assert counter == QueryCounter(trajectories=3, code=3 + 2 + 1, minimal=1 + 2 + 1)
