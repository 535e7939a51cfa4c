"""Countdown: reach a target with given numbers, each used once, and + - * /. Data and its check, no learning.

prompt       3 , 5 , 1 2 : 2 4 =            (digits apart: the alphabet is ten digits and a few signs)
completion   ( 5 - 3 ) * 1 2
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from envs.errors import UserError
from envs.text_tasks import GeneratedTask, Problem, TextTaskConfig, check_range, read_options

OPERATORS = "+-*/"
LONGEST = 1000  # characters of an expression that are looked at
Term = tuple[int, str, bool]  # value, text, whether it is a single number


@dataclass(kw_only=True)
class Options:
    """numbers: how many; largest: of them; largest_target: targets are 1 to this.

    spaced: digits apart ("1 2"), as a tokenizer of digits wants them; else written as usual ("12").
    """

    numbers: int = 3
    largest: int = 20
    largest_target: int = 99
    operators: str = OPERATORS
    spaced: bool = True


class Countdown(GeneratedTask):
    """See the module. Right: an expression over exactly the given numbers that is worth the target.

    Problems are made from a random expression whose parts are all whole and not negative, so every one has
    a solution; any other is as right. The splits share no (numbers, target).
    """

    name = "countdown"

    def __init__(self, cfg: TextTaskConfig) -> None:
        super().__init__(cfg)
        self.options: Options = read_options(Options, cfg.options)
        check_range("numbers", self.options.numbers, 2, 8)
        check_range("largest", self.options.largest, 1, 10**6)
        check_range("largest_target", self.options.largest_target, 1, 10**9)
        signs = self.options.operators
        if not signs or not set(signs) <= set(OPERATORS):
            raise UserError("env.options.operators names no operation", given=signs, allowed=OPERATORS)
        self.pattern = rf"[\d+\-*/() ]{{1,{LONGEST}}}"

    def draw(self, rng: random.Random) -> Problem:
        """See `GeneratedTask`."""
        for _ in range(10_000):
            numbers = [rng.randint(1, self.options.largest) for _ in range(self.options.numbers)]
            made = _expression(numbers, self.options.operators, rng)
            if made is not None and 1 <= made[0] <= self.options.largest_target:
                break
        else:
            raise self._too_few("no target in reach in 10,000 draws")
        target, shown, _ = made
        solution = self._write(shown)
        meta = {"numbers": numbers, "target": target, "answer": solution}
        text = f"{' , '.join(map(str, numbers))} : {target} ="
        return Problem(text=self._write(text), shown=solution, meta=meta)

    def key(self, problem: Problem) -> str:
        """See `GeneratedTask`."""
        return f"{sorted(problem.meta['numbers'])} {problem.meta['target']}"

    def _write(self, text: str) -> str:
        return re.sub(r"(?<=\d)(?=\d)", " ", text) if self.options.spaced else text

    def check(self, meta: dict[str, Any], completion: str) -> float:
        """1 when the completion reaches the target, else 0."""
        return float(reaches(meta["numbers"], meta["target"], completion))

    def vocabulary(self) -> list[str] | None:
        """See `TextTask`; None unless digits are written apart."""
        return [*"0123456789", *OPERATORS, "(", ")", ",", ":", "="] if self.options.spaced else None


def reaches(numbers: list[int], target: int, text: str) -> bool:
    """Whether an expression uses exactly `numbers` and is worth `target`. Evaluated in exact fractions."""
    try:
        value, used = evaluate(text)
    except (ValueError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """(value, numbers in their order) of an expression with + - * / and brackets; digits may stand apart.

    Raises ValueError for anything else, ZeroDivisionError.
    """
    if len(text) > LONGEST:
        raise ValueError("too long")
    joined = re.sub(r"(?<=[0-9])\s+(?=[0-9])", "", text.strip())
    tokens = re.findall(r"[0-9]+|[-+*/()]", joined)
    if "".join(tokens) != re.sub(r"\s+", "", joined) or not tokens:
        raise ValueError("not an expression")
    used: list[int] = []
    value, end = _sum(tokens, 0, used, 0)
    if end != len(tokens):
        raise ValueError(f"unexpected {tokens[end]}")
    return value, used


def _sum(tokens: list[str], at: int, used: list[int], depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, used, depth)
    while at < len(tokens) and tokens[at] in "+-":
        other, after = _product(tokens, at + 1, used, depth)
        value, at = (value + other if tokens[at] == "+" else value - other), after
    return value, at


def _product(tokens: list[str], at: int, used: list[int], depth: int) -> tuple[Fraction, int]:
    value, at = _atom(tokens, at, used, depth)
    while at < len(tokens) and tokens[at] in "*/":
        other, after = _atom(tokens, at + 1, used, depth)
        value, at = (value * other if tokens[at] == "*" else value / other), after
    return value, at


def _atom(tokens: list[str], at: int, used: list[int], depth: int) -> tuple[Fraction, int]:
    if at == len(tokens) or depth > 50:
        raise ValueError("an operand is missing" if depth <= 50 else "too many brackets")
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1, used, depth + 1)
        if at == len(tokens) or tokens[at] != ")":
            raise ValueError("a bracket is open")
        return value, at + 1
    number = int(tokens[at])  # ValueError for a sign
    used.append(number)
    return Fraction(number), at + 1


def _expression(numbers: list[int], operators: str, rng: random.Random) -> Term | None:
    """A random expression over all numbers; None when a part would be negative or broken."""
    terms: list[Term] = [(n, str(n), True) for n in rng.sample(numbers, len(numbers))]
    while len(terms) > 1:
        i = rng.randrange(len(terms) - 1)
        (a, left, _), (b, right, right_single) = terms[i], terms[i + 1]
        sign = rng.choice(operators)
        if (sign == "/" and (b == 0 or a % b)) or (sign == "-" and a < b):
            return None
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if sign == "/" else 0}[sign]
        left = left if terms[i][2] else f"( {left} )"
        right = right if right_single else f"( {right} )"
        terms[i : i + 2] = [(value, f"{left} {sign} {right}", False)]
    return terms[0]
