"""Text tasks against enumeration: what the tasks call right is right, and what they call wrong is wrong."""

from __future__ import annotations

import collections
import itertools
import re
import subprocess
import sys
from typing import Any

import pytest

from envs.countdown import evaluate, reaches
from envs.errors import UserError
from envs.text_tasks import TextTaskConfig, check_task_config, make_task
from tests.reference import text_tasks as truth

OPENER = re.compile(r"(\w+) we get")


def task(name: str, **settings: Any) -> Any:
    return make_task(TextTaskConfig(task=name, **settings))


def digits(text: str) -> tuple[int, ...]:
    """The last 16 cells in a text."""
    return tuple(map(int, re.findall(r"[1-4]", text)))[-16:]


# --- the oracles themselves


def test_there_are_288_grids() -> None:
    assert len(set(truth.all_grids())) == 288


def test_countdown_by_hand() -> None:
    assert {24, 2, -2, 0} & truth.values([4, 6]) == {24, 2, -2}
    assert truth.values([3, 0]) == {3, -3, 0}  # 3 / 0 is nothing


def test_steps_by_hand() -> None:
    text = "so 7 + 95 = 2 ; then 2 - 3 = 99 ; ans 99"
    assert [truth.step_result(a, sign, b) == c for a, sign, b, c in truth.steps(text)] == [True, True]
    assert truth.step_result(13, "*", 9) == 17


# --- sudoku


def test_sudoku_splits_are_all_grids() -> None:
    sudoku = task("sudoku4")
    train = {digits(sudoku.demonstration(i)) for i in range(200)}
    assert (len(train), sudoku.eval_size) == (200, 88)
    held_out = set(truth.all_grids()) - train
    assert train <= set(truth.all_grids())
    assert len(held_out) == 88
    for i in range(88):
        prompt = sudoku.eval(i)
        right = [grid for grid in held_out if sudoku.check(prompt.meta, " ".join(map(str, grid))) == 1.0]
        assert right, f"no held-out grid solves the puzzle {prompt.text}"


def test_sudoku_checks_every_grid_as_the_rules_do() -> None:
    sudoku = task("sudoku4")
    for i in range(5):
        prompt = sudoku.train(i)
        shown = re.findall(r"[1-4_.]", prompt.text)[-16:]
        assert sum(cell in "_." for cell in shown) == 10
        for grid in truth.all_grids():
            fits = all(cell in "_." or int(cell) == filled for cell, filled in zip(shown, grid))
            assert sudoku.check(prompt.meta, " ".join(map(str, grid))) == float(fits)
        broken = list(digits(sudoku.demonstration(i)))
        broken[0] = broken[0] % 4 + 1
        assert sudoku.check(prompt.meta, " ".join(map(str, broken))) == 0.0
        assert sudoku.check(prompt.meta, " ".join(map(str, broken[:15]))) == 0.0


# --- countdown


@pytest.mark.parametrize("numbers", [3, 4])
def test_countdown_is_solvable_and_the_demonstration_solves_it(numbers: int) -> None:
    countdown = task("countdown", options={"numbers": numbers})
    for i in range(20):
        prompt, shown = countdown.train(i), countdown.demonstration(i)
        *given, target = (int(n.replace(" ", "")) for n in re.findall(r"\d(?: \d)*", prompt.text))
        assert len(given) == numbers
        reachable = dict(truth.expressions(given))
        assert target in reachable, f"no expression over the numbers of {prompt.text!r} is worth its target"
        assert countdown.check(prompt.meta, reachable[target]) == 1.0
        assert countdown.check(prompt.meta, shown) == 1.0
        other = next(text for value, text in reachable.items() if value != target)
        assert countdown.check(prompt.meta, other) == 0.0
        assert countdown.check(prompt.meta, f"{shown} + 0") == 0.0
        assert countdown.check(prompt.meta, str(target)) == 0.0


def test_countdown_judges_every_expression_as_enumeration_does() -> None:
    for value, text in truth.expressions([7, 3, 5]):
        assert evaluate(text)[0] == value
        assert reaches([3, 5, 7], 22, text) == (value == 22)


NO_EXPRESSIONS = ["", "1 +", "+ 1", "( 1", "1 )", "1 1 +", "2 ** 3", "1 // 2", "a", "1_0", "\uff11", "()"]


@pytest.mark.parametrize("text", NO_EXPRESSIONS)
def test_countdown_refuses_what_is_no_expression(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        evaluate(text)


def test_countdown_reads_signs_by_rank_and_from_the_left() -> None:
    assert evaluate("8 - 4 - 2")[0] == 2
    assert evaluate("8 / 4 / 2")[0] == 1
    assert evaluate("2 + 3 * 4")[0] == 14
    assert evaluate("1 2 + 3") == (15, [12, 3])


# --- chained arithmetic


def test_chained_arithmetic_writes_true_steps() -> None:
    chain = task("chained_arithmetic")
    openers = set()
    for i in range(50):
        prompt, shown = chain.train(i), chain.demonstration(i)
        written = truth.steps(shown)
        assert written
        for a, sign, b, c in written:
            assert truth.step_result(a, sign, b) == c, shown
        for before, after in itertools.pairwise(written):
            assert after[0] == before[3], f"a step does not go on from the one before it: {shown}"
        answer = int(re.findall(r"\d+", shown)[-1])
        assert answer == written[-1][3]
        assert chain.check(prompt.meta, shown) == 1.0
        wrong = re.sub(r"\d+(?=\D*$)", str((answer + 1) % 100), shown)
        assert chain.check(prompt.meta, wrong) == 0.0
        openers |= set(OPENER.findall(shown))
    assert len(openers) == 6


def test_openers_do_not_change_the_answer() -> None:
    chain = task("chained_arithmetic")
    prompt, shown = chain.train(0), chain.demonstration(0)
    for word in {word for i in range(50) for word in OPENER.findall(chain.demonstration(i))}:
        changed = OPENER.sub(f"{word} we get", shown)
        assert chain.check(prompt.meta, changed) == 1.0
        assert re.fullmatch(chain.pattern, changed)


def test_openers_are_drawn_evenly() -> None:
    chain = task("chained_arithmetic")
    words = [word for i in range(2000) for word in OPENER.findall(chain.demonstration(i))]
    counts = sorted(collections.Counter(words).values())
    # 6000 draws from 6: 1000 each, standard deviation 29
    assert (len(counts), sum(counts)) == (6, 6000)
    assert 870 < counts[0] <= counts[-1] < 1130


# --- every task


CLOSED = ["chained_arithmetic", "countdown", "sudoku4"]


@pytest.mark.parametrize("name", CLOSED)
def test_splits_are_disjoint_and_repeat_themselves(name: str) -> None:
    first, again = task(name), task(name)
    train = [first.train(i) for i in range(100)]
    held_out = [first.eval(i) for i in range(50)]
    assert train == [again.train(i) for i in range(100)]
    assert held_out == [again.eval(i) for i in range(50)]
    assert not {p.id for p in train} & {p.id for p in held_out}
    assert not {p.text for p in train} & {p.text for p in held_out}


@pytest.mark.parametrize("name", CLOSED)
def test_the_vocabulary_covers_prompts_and_demonstrations(name: str) -> None:
    given = task(name)
    words = set(given.vocabulary())
    assert len(words) == len(given.vocabulary())
    for i in range(100):
        assert set(given.train(i).text.split()) | set(given.demonstration(i).split()) <= words
        assert set(given.eval(i % 50).text.split()) <= words


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("junk", ["", " ", "no number", "x = = 1 1", "9" * 9999, "(" * 500, "1/0", "\x00"])
def test_junk_is_wrong_and_does_not_raise(name: str, junk: str) -> None:
    given = task(name)
    assert given.check(given.train(0).meta, junk) == 0.0


def test_unknown_tasks_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="chained_arithmetic"):
        check_task_config(TextTaskConfig(task="chained_arithmetics"))
    with pytest.raises(UserError, match="countdown"):
        check_task_config(TextTaskConfig(task="reasoning_gym/countdwn"))
    with pytest.raises(UserError):
        check_task_config(TextTaskConfig(task="countdown", options={"no_such_option": 1}))


def test_tasks_load_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from envs.text_tasks import TextTaskConfig as C, make_task;"
        "t = make_task(C(task='countdown')); t.check(t.train(0).meta, t.demonstration(0));"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
