"""Ground truth of the text tasks by enumeration: slow, obvious, and shares no code with what it checks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

Grid = tuple[int, ...]  # 16 cells of a 4x4 grid, row by row


def units() -> list[list[int]]:
    """The cells of the 4 rows, 4 columns and 4 boxes."""
    rows = [[4 * r + c for c in range(4)] for r in range(4)]
    columns = [[4 * r + c for r in range(4)] for c in range(4)]
    boxes = [
        [4 * (2 * i + r) + 2 * j + c for r in range(2) for c in range(2)] for i in range(2) for j in range(2)
    ]
    return rows + columns + boxes


def is_solved(grid: Sequence[int]) -> bool:
    """Whether each of the 12 units holds 1, 2, 3 and 4."""
    return len(grid) == 16 and all({grid[cell] for cell in unit} == {1, 2, 3, 4} for unit in units())


def all_grids() -> list[Grid]:
    """Every solved grid: all 24^2 choices of two rows that fill their boxes, twice, filtered."""
    rows = list(itertools.permutations((1, 2, 3, 4)))
    bands = [a + b for a, b in itertools.product(rows, repeat=2) if len({*a[:2], *b[:2]}) == 4]
    return [top + bottom for top, bottom in itertools.product(bands, repeat=2) if is_solved(top + bottom)]


def values(numbers: Sequence[int]) -> set[Fraction]:
    """Everything that an expression with each of the numbers once and + - * / can be worth."""
    return {value for value, _ in expressions(numbers)}


def expressions(numbers: Sequence[int]) -> list[tuple[Fraction, str]]:
    """(value, text) of each fully bracketed expression with each of the numbers once."""
    return list(_combine([(Fraction(n), str(n)) for n in numbers]))


def _combine(parts: list[tuple[Fraction, str]]) -> Iterator[tuple[Fraction, str]]:
    if len(parts) == 1:
        yield parts[0]
        return
    for i, j in itertools.permutations(range(len(parts)), 2):
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        (x, a), (y, b) = parts[i], parts[j]
        joined = [(x + y, "+"), (x - y, "-"), (x * y, "*")] + ([(x / y, "/")] if y else [])
        for value, sign in joined:
            yield from _combine([*rest, (value, f"( {a} {sign} {b} )")])


STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


def steps(text: str) -> list[tuple[int, str, int, int]]:
    """The written steps "a + b = c" of a chain of arithmetic, in their order."""
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in STEP.findall(text)]


def step_result(a: int, sign: str, b: int) -> int:
    """a sign b modulo 100, by counting."""
    if sign == "*":
        return sum([a] * b) % 100
    return list(range(100))[(a + (b if sign == "+" else -b)) % 100]


def pass_at_k(correct: int, n: int, k: int) -> Fraction:
    """Share of the k-subsets of n samples, `correct` of them right, that hold a right one."""
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    return Fraction(sum(any(subset) for subset in subsets), len(subsets))
