"""pass@k against enumeration of all k-subsets."""

from __future__ import annotations

import pytest

from evaluators import language
from tests.reference import text_tasks as truth


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for k in range(1, n + 1):
        for correct in range(n + 1):
            assert language.pass_at_k(n, correct, k) == pytest.approx(
                float(truth.pass_at_k(correct, n, k)), abs=1e-12
            )


def test_pass_at_k_at_sizes_whose_binomials_overflow_floats() -> None:
    # one right of n: the chance that it is among the k
    assert language.pass_at_k(5000, 1, 2500) == pytest.approx(0.5, abs=1e-12)
    assert language.pass_at_k(5000, 0, 2500) == 0.0
    assert language.pass_at_k(5000, 2600, 2500) == 1.0


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 5, 2), (4, -1, 2), (4, 1, 0)])
def test_pass_at_k_refuses_what_has_no_meaning(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - UserError is one
        language.pass_at_k(n, correct, k)
