"""Datasets as tasks: their columns, splits and checks; what is wrong with them is told."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from envs.dataset_task import final_answer
from envs.errors import UserError
from envs.text_tasks import TextTaskConfig, check_task_config, make_task

ROWS = [
    {"question": f"{i} plus 1?", "answer": f"It is one more.\n#### {i + 1:,}", "level": i % 3}
    for i in range(1500)
]


def write(folder: Path, rows: Any, kind: str = "jsonl") -> str:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def task(path: str, **settings: Any) -> Any:
    settings.setdefault("columns", {"prompt": "question"})
    return make_task(TextTaskConfig(task="dataset", path=path, **settings))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_of_a_file(kind: str, tmp_path: Path) -> None:
    given = task(write(tmp_path, ROWS, kind))
    assert given.train_size + given.eval_size == len(ROWS)
    texts = [given.train(i).text for i in range(given.train_size)]
    held_out = [given.eval(i).text for i in range(given.eval_size)]
    assert sorted(texts + held_out) == sorted(row["question"] for row in ROWS)
    prompt = given.train(5)
    number = int(prompt.text.split()[0])
    assert prompt.meta["level"] == number % 3
    assert given.check(prompt.meta, f"so <answer>{number + 1}</answer>") == 1.0
    assert given.check(prompt.meta, f"{number + 1}.0") == 1.0
    assert given.check(prompt.meta, f"{number + 2}") == 0.0
    assert given.check(prompt.meta, given.demonstration(5)) == 1.0


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    import datasets

    folder = str(tmp_path / "saved")
    parts = {"train": ROWS[:20], "test": ROWS[15:25]}
    made = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    given = task(folder, options={"eval_split": "test"})
    assert given.eval_size == 10
    assert [given.train(i).text for i in range(given.train_size)] == [r["question"] for r in ROWS[:15]]


def test_a_prompt_that_occurs_twice_is_in_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i % 30}", "answer": str(i)} for i in range(300)]
    given = task(write(tmp_path, rows), columns={}, eval_size=10)
    train = {given.train(i).text for i in range(given.train_size)}
    held_out = [given.eval(i).text for i in range(given.eval_size)]
    assert (len(train), len(set(held_out)), len(held_out)) == (20, 10, 10)
    assert not train & set(held_out)


def test_the_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first = task(write(tmp_path, ROWS))
    shuffled = task(write(tmp_path, ROWS[::-1], "json"))
    other = task(write(tmp_path, ROWS), seed=1)
    held_out = [{t.eval(i).text for i in range(t.eval_size)} for t in (first, shuffled, other)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_chat_messages(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"hi {i}"}],
            "completion": [{"role": "assistant", "content": "ho"}],
        }
        for i in range(20)
    ]
    given = task(write(tmp_path, rows), columns={})
    prompt = given.train(0)
    assert prompt.text is None
    assert prompt.messages[0]["role"] == "user"
    assert prompt.meta["conversational"] is True
    assert given.demonstration(0) == "ho"


def test_columns_for_other_learners_are_not_missed_before_they_are_needed(tmp_path: Path) -> None:
    given = task(write(tmp_path, [{"text": f"t{i}"} for i in range(20)]), columns={})
    assert given.train_size == 18
    assert given.demonstration(0) is None
    with pytest.raises(UserError, match=r"env\.columns"):
        given.train(0)
    answerless = task(write(tmp_path, [{"prompt": f"t{i}"} for i in range(20)]), columns={})
    with pytest.raises(UserError, match="answer"):
        answerless.check(answerless.train(0).meta, "x")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The sum\n#### 1,234", Fraction(1234)),
        ("#### 1\n#### 2", Fraction(2)),
        (r"thus \boxed{\frac{1}{2}} <answer>  Blue  Whale </answer>", "blue whale"),
        (r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("$1/2", Fraction(1, 2)),
        ("1/0", "1/0"),
        ("-.5", Fraction(-1, 2)),
        ("3.", Fraction(3)),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_final_answers(text: str, answer: Any) -> None:
    assert final_answer(text) == answer


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    for path, told in ((None, "env.path"), (str(tmp_path / "no.jsonl"), "no such")):
        with pytest.raises(UserError, match=told):
            check_task_config(TextTaskConfig(task="dataset", path=path))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    for content, told in (
        ("{", "can't be read"),
        ("", "no rows"),
        ("[1]", "column names"),
        ('{"prompt": "a"}', "left"),
    ):
        broken.write_text(content)
        with pytest.raises(UserError, match=told):
            task(str(broken))
