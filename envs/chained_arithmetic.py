"""Chained arithmetic modulo 100 with written steps, each behind a free word: data and its check, no learning.

prompt       7 + 5 - 3 =
completion   so we get 7 + 5 = 12 ; then we get 12 - 3 = 9 ; ans 9

Which of the six words opens a step does not matter, "we get" never changes, and only the numbers are worth
something: so one can tell whether credit falls on the tokens that decide.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from envs.errors import UserError
from envs.text_tasks import GeneratedTask, Problem, TextTaskConfig, check_range, read_options

MODULUS = 100
OPENERS = ("so", "then", "now", "next", "thus", "here")
BOILERPLATE = "we get"
OPERATORS = "+-*"


@dataclass(kw_only=True)
class Options:
    """steps: operations in a chain; largest: of the numbers after the first, which is below 100."""

    steps: int = 3
    largest: int = 3
    operators: str = "+-"


class ChainedArithmetic(GeneratedTask):
    """See the module. Right: the completion ends with "ans" and the chain's value."""

    name = "chained_arithmetic"

    def __init__(self, cfg: TextTaskConfig) -> None:
        super().__init__(cfg)
        self.options: Options = read_options(Options, cfg.options)
        check_range("steps", self.options.steps, 1, 20)
        check_range("largest", self.options.largest, 1, MODULUS - 1)
        signs = self.options.operators
        if not signs or not set(signs) <= set(OPERATORS):
            raise UserError("env.options.operators names no operation", given=signs, allowed=OPERATORS)
        step = rf"({'|'.join(OPENERS)}) {BOILERPLATE} \d+ [{OPERATORS}] \d+ = \d+ ; ".replace("+-", "+\\-")
        self.pattern = rf"({step}){{{self.options.steps}}}ans \d+"

    def draw(self, rng: random.Random) -> Problem:
        """See `GeneratedTask`."""
        total = rng.randrange(MODULUS)
        chain, steps = [str(total)], []
        for _ in range(self.options.steps):
            sign, number = rng.choice(self.options.operators), rng.randint(1, self.options.largest)
            before, total = total, apply(total, sign, number)
            chain += [sign, str(number)]
            steps.append(f"{rng.choice(OPENERS)} {BOILERPLATE} {before} {sign} {number} = {total} ;")
        return Problem(
            text=f"{' '.join(chain)} =",
            shown=f"{' '.join(steps)} ans {total}",
            meta={"answer": str(total)},
        )

    def check(self, meta: dict[str, Any], completion: str) -> float:
        """1 when the last two words are "ans" and the value, else 0."""
        return float(completion.split()[-2:] == ["ans", meta["answer"]])

    def vocabulary(self) -> list[str]:
        """See `TextTask`: the numbers below 100, operations, openers and boilerplate."""
        return [*map(str, range(MODULUS)), *OPERATORS, "=", ";", "ans", *BOILERPLATE.split(), *OPENERS]


def apply(a: int, sign: str, b: int) -> int:
    """a sign b, modulo 100."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign] % MODULUS
