"""Rewards by name on real samples, mathematics included; how results combine."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from envs.errors import UserError
from envs.text_tasks import TextTaskConfig, make_task
from rewards.child import ChildRewarder, MathCheck, TaskCheck
from rewards.functions import as_reward, check_rewards, make_rewards
from rewards.reward import Failure, NotApplicable, Value, combine
from rollouts.samples import Sample


def sample(completion: str, **meta: Any) -> Sample:
    return Sample(
        id="s", group=0, index=0, prompt_ids=[1], completion_ids=list(range(len(completion.split()))),
        finish="eos", logp_rollout=np.zeros(1, np.float32), meta=meta, completion=completion,
    )  # fmt: skip


def test_the_named_ones_on_chained_arithmetic() -> None:
    task = make_task(TextTaskConfig(task="chained_arithmetic"))
    meta, right = task.train(0).meta, task.demonstration(0)
    group = [sample(text, **meta) for text in (right, right + " ;", "ans " + meta["answer"])]
    scores = {
        name: rewarder.score([group], None)[0]
        for name, _, rewarder in make_rewards(
            ["exact", "format", "length", "countdown", "sudoku"], None, task
        )
    }
    words = len(right.split())
    assert scores == {
        "exact": [Value(1.0), Value(0.0), Value(1.0)],
        "format": [Value(1.0), Value(0.0), Value(0.0)],
        "length": [Value(words / 64), Value((words + 1) / 64), Value(2 / 64)],
        "countdown": [NotApplicable()] * 3,
        "sudoku": [NotApplicable()] * 3,
    }


def test_countdown_and_sudoku_judge_by_the_columns_alone() -> None:
    task = make_task(TextTaskConfig(task="chained_arithmetic"))
    (_, _, countdown), (_, _, sudoku) = make_rewards(["countdown", "sudoku"], None, task)
    group = [sample(text, numbers=[3, 5, 2], target=16) for text in ("(3 + 5) * 2", "3 + 5 + 2", "16")]
    assert countdown.score([group], None) == [[Value(1.0), Value(0.0), Value(0.0)]]
    puzzle = "1 _ _ _ 3 4 1 2 2 1 4 3 4 3 2 1"
    grids = (
        "1 2 3 4 3 4 1 2 2 1 4 3 4 3 2 1",
        "1234 3412 2143 4321",
        "2 1 3 4 3 4 1 2 2 1 4 3 4 3 2 1",
        "1 2 3",
    )
    scores = sudoku.score([[sample(grid, puzzle=puzzle) for grid in grids]], None)
    assert scores == [[Value(1.0), Value(1.0), Value(0.0), Value(0.0)]]


def test_a_check_that_raises_is_a_failure_of_its_sample_alone() -> None:
    task = make_task(TextTaskConfig(task="countdown"))
    ((_, _, exact),) = make_rewards(["exact"], None, task)
    good = task.train(0)
    scores = exact.score([[sample("1", **good.meta), sample("1")]], None)
    assert scores == [[Value(0.0), Failure("KeyError")]]


def test_a_task_without_a_pattern_has_no_format() -> None:
    task = make_task(TextTaskConfig(task="countdown"))
    task.pattern = None
    with pytest.raises(UserError, match="pattern"):
        make_rewards(["format"], None, task)


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (None, NotApplicable()),
        (True, Value(1.0)),
        (np.bool_(False), Value(0.0)),
        (np.float32(0.5), Value(0.5)),
        (3, Value(3.0)),
        (float("nan"), Failure("nan")),
        (-math.inf, Failure("infinite")),
        (10**400, Failure("infinite")),
        ("1.0", Failure("type")),
        ([1.0], Failure("type")),
        (1j, Failure("type")),
    ],
)
def test_what_a_function_may_give(given: Any, reward: Any) -> None:
    assert as_reward(given) == reward


def test_combining() -> None:
    weights = {"a": 2.0, "b": 0.5, "c": 1.0}
    assert combine({"a": Value(1.0), "b": Value(-2.0), "c": NotApplicable()}, weights) == Value(
        1.0, {"a": 1.0, "b": -2.0}
    )
    assert combine({"a": Value(1.0), "b": Failure("nan")}, weights) == Failure("b:nan")
    assert combine({"c": NotApplicable()}, weights) == NotApplicable()
    with pytest.raises(ValueError, match="finite"):
        Value(math.nan)


@pytest.mark.parametrize("names", [[], ["exact", "exact"], ["module:"], [":f"], ["json:not a name"]])
def test_names_that_cannot_be_are_refused(names: list[str]) -> None:
    with pytest.raises(UserError):
        check_rewards(names)


# --- mathematics, in a child


@pytest.fixture(scope="module")
def mathematics() -> Any:
    pytest.importorskip("math_verify")
    rewarder = ChildRewarder(MathCheck(), deadline_s=60.0)
    yield rewarder
    rewarder.close()


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("0.5", r"so the answer is \boxed{\frac{1}{2}}.", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("3", "It is 4, no: the final answer is $3$", 1.0),
        ("3", "nothing here", 0.0),
        ("3", "", 0.0),
        ("x^2+2x+1", r"$(x+1)^2$", 1.0),
        ("x^2+2x+1", r"$(x+2)^2$", 0.0),
        ("1,234", "1234", 1.0),
        (r"\{1,2\}", r"$\{2,1\}$", 1.0),
    ],
)
def test_mathematics(mathematics: Any, answer: str, completion: str, right: float) -> None:
    assert mathematics.score([[sample(completion, answer=answer)]], None) == [[Value(right)]]


def test_an_answer_that_takes_for_ever_fails_alone() -> None:
    pytest.importorskip("math_verify")
    rewarder = ChildRewarder(MathCheck(), deadline_s=60.0)
    tower = "$" + "9^{" * 12 + "9" + "}" * 12 + "$"
    try:
        scores = rewarder.score(
            [[sample("$3$", answer="3"), sample(tower, answer="3")], [sample("$3$", answer="3")]], None
        )
    finally:
        rewarder.close()
    assert scores[0][0] == scores[1][0] == Value(1.0)
    assert scores[0][1] in (Failure("deadline"), Failure("memory"), Value(0.0))


def test_mathematics_needs_an_answer(mathematics: Any) -> None:
    with pytest.raises(UserError, match=r"env\.columns"):
        mathematics.score([[sample("3")]], None)


def test_a_tasks_check_in_a_child_is_the_tasks_check_and_survives_a_pickle() -> None:
    task = make_task(TextTaskConfig(task="countdown", seed=5))
    rewarder = pickle.loads(pickle.dumps(ChildRewarder(TaskCheck(task), deadline_s=60.0)))
    prompt = task.train(3)
    try:
        texts = [task.demonstration(3), "1 + 1", ""]
        scores = rewarder.score([[sample(text, **prompt.meta) for text in texts]], None)
    finally:
        rewarder.close()
    assert scores == [[Value(task.check(prompt.meta, text)) for text in texts]]
    assert scores[0][0] == Value(1.0)
