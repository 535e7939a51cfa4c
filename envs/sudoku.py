"""4x4 Sudoku over all 288 grids: data and its check, no learning.

prompt       _ 2 3 _ _ _ _ 2 4 _ 1 _ _ _ _ _ =      (16 cells, row by row; _ is blank)
completion   1 2 3 4 3 4 1 2 4 3 1 ...               (all 16 cells)
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from typing import Any

from envs.errors import UserError
from envs.text_tasks import Prompt, TextTask, TextTaskConfig, check_index, check_range, read_options

SIZE = 4
BLANK = "_"
GRIDS = 288
TRAIN_GRIDS = 200
Grid = tuple[int, ...]


@dataclass(kw_only=True)
class Options:
    """blanks: cells to fill in; train_grids: of the 288, the others are for evaluation."""

    blanks: int = 10
    train_grids: int = TRAIN_GRIDS


class Sudoku4(TextTask):
    """See the module. Right: every clue kept; each row, column and box holds 1 to 4.

    Training goes through its grids again and again, each time with other blanks; a grid is never in both
    splits, nor is a puzzle. One puzzle may have several solutions: each is right.
    """

    pattern = r"[1-4]( [1-4]){15}"

    def __init__(self, cfg: TextTaskConfig) -> None:
        self.options: Options = read_options(Options, cfg.options)
        check_range("blanks", self.options.blanks, 1, SIZE * SIZE)
        check_range("train_grids", self.options.train_grids, 1, GRIDS - 1)
        self.cfg, self.seed = cfg, cfg.seed
        grids = solved_grids()
        random.Random(f"sudoku4/{cfg.seed}/split").shuffle(grids)
        self.train_grids, held_out = grids[: self.options.train_grids], grids[self.options.train_grids :]
        self.train_size = cfg.train_size
        self.eval_size = len(held_out) if cfg.eval_size is None else cfg.eval_size
        if self.eval_size > len(held_out):
            raise UserError("env.eval_size exceeds the held-out grids", given=self.eval_size,
                            allowed=f"1 to {len(held_out)}", fix="lower env.options.train_grids")  # fmt: skip
        self._held_out = [
            blanked(grid, self.options.blanks, random.Random(f"sudoku4/{cfg.seed}/eval/{i}"))
            for i, grid in enumerate(held_out)
        ]
        self._held_out_grids = held_out

    def train(self, index: int) -> Prompt:
        """See `TextTask`."""
        check_index(index, self.train_size)
        grid = self.train_grids[index % len(self.train_grids)]
        for attempt in range(1000):
            noise = random.Random(f"sudoku4/{self.seed}/train/{index}/{attempt}")
            puzzle = blanked(grid, self.options.blanks, noise)
            if puzzle not in self._held_out:
                return self._prompt(f"train-{index}", puzzle, grid)
        raise UserError("all puzzles of a training grid are held out", given=self.options.blanks,
                        fix="lower env.options.blanks")  # fmt: skip

    def eval(self, index: int) -> Prompt:
        """See `TextTask`."""
        check_index(index, self.eval_size)
        return self._prompt(f"eval-{index}", self._held_out[index], self._held_out_grids[index])

    def _prompt(self, name: str, puzzle: list[str], grid: Grid) -> Prompt:
        meta = {"puzzle": " ".join(puzzle), "answer": " ".join(map(str, grid))}
        return Prompt(id=name, text=f"{' '.join(puzzle)} =", meta=meta)

    def demonstration(self, index: int) -> str:
        """See `TextTask`."""
        return " ".join(map(str, self.train_grids[index % len(self.train_grids)]))

    def check(self, meta: dict[str, Any], completion: str) -> float:
        """1 when the completion is 16 cells that solve the puzzle, else 0."""
        return float(solves(meta["puzzle"], completion))

    def vocabulary(self) -> list[str]:
        """See `TextTask`."""
        return ["1", "2", "3", "4", BLANK, "="]


def solves(puzzle: str, completion: str) -> bool:
    """Whether the cells "1 2 3 4 ..." are a solved grid that keeps the puzzle's clues."""
    if not re.fullmatch(r"\s*[1-4](\s*[1-4]){15}\s*", completion):
        return False
    cells = re.findall(r"[1-4]", completion)
    kept = all(clue in (BLANK, cell) for clue, cell in zip(puzzle.split(), cells))
    return kept and is_solved(tuple(map(int, cells)))


def is_solved(grid: Grid) -> bool:
    """Whether every row, column and box of 16 cells in 1..4 holds four different ones."""
    return all(len({grid[cell] for cell in unit}) == SIZE for unit in UNITS)


def solved_grids() -> list[Grid]:
    """All solved grids, in lexicographic order."""

    def grow(rows: tuple[Grid, ...]) -> list[Grid]:
        if len(rows) == SIZE:
            grid = tuple(itertools.chain(*rows))
            return [grid] if is_solved(grid) else []
        return [
            grid
            for row in itertools.permutations(range(1, SIZE + 1))
            if all(a != b for other in rows for a, b in zip(row, other))
            for grid in grow((*rows, row))
        ]

    return grow(())


def blanked(grid: Grid, blanks: int, rng: random.Random) -> list[str]:
    """The grid's cells with `blanks` of them blank."""
    hidden = set(rng.sample(range(SIZE * SIZE), blanks))
    return [BLANK if i in hidden else str(cell) for i, cell in enumerate(grid)]


def _units() -> list[tuple[int, ...]]:
    cells = range(SIZE * SIZE)
    places = [(i // SIZE, i % SIZE) for i in cells]
    groups = (
        [r for r, _ in places],
        [c for _, c in places],
        [r // 2 * 2 + c // 2 for r, c in places],
    )
    return [tuple(i for i in cells if group[i] == n) for group in groups for n in range(SIZE)]


UNITS = _units()
