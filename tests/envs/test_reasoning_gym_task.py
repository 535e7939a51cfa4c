"""reasoning-gym's generators as tasks: own answers are right, others wrong, prompts the same everywhere."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")
from envs.errors import UserError
from envs.reasoning_gym_server import freeze, thaw
from envs.text_tasks import TextTaskConfig, check_task_config, make_task

# Their entries hold no answer that could be shown, though their verifiers judge.
SILENT = {"boxnet", "rush_hour"}
JUNK = ["", "   ", "no such answer", "-123456789", "{", "None", "0/0", "\x00", "[[["]


def gym(name: str, **settings: Any) -> Any:
    return make_task(TextTaskConfig(task=f"reasoning_gym/{name}", **settings))


def generators() -> list[str]:
    code = "import json; from reasoning_gym.factory import DATASETS; print(json.dumps(sorted(DATASETS)))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return [name for name in json.loads(out.stdout.splitlines()[-1]) if name != "composite"]


def check_generator(name: str, count: int = 2) -> None:
    task = gym(name, seed=3)
    for index in range(count):
        prompt, shown = task.train(index), task.demonstration(index)
        meta = json.loads(json.dumps(prompt.meta))  # as a checkpoint or a child process gets it
        assert prompt.text
        assert (shown is None) == (name in SILENT), "whether there is a demonstration"
        if shown is not None:
            assert task.check(meta, shown) == 1.0
            assert task.check(meta, f"Let me see. <answer> {shown} </answer>") == 1.0
        for junk in JUNK:
            assert junk.strip() == shown or task.check(meta, junk) == 0.0, f"{junk!r} is called right"


@pytest.mark.parametrize("name", ["basic_arithmetic", "propositional_logic", "game_of_life_halting", "rearc"])
def test_a_generator_verifies_its_own_answer_and_refuses_others(name: str) -> None:
    check_generator(name)


@pytest.mark.slow
def test_every_generator_verifies_its_own_answer_and_refuses_others() -> None:
    wrong = {}
    for name in generators():
        try:
            check_generator(name)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {str(error)[:300]}"
    assert not wrong, json.dumps(wrong, indent=1)


def test_prompts_do_not_depend_on_the_processes_hashes() -> None:
    code = """
from envs.text_tasks import TextTaskConfig, make_task
task = make_task(TextTaskConfig(task="reasoning_gym/isomorphic_strings"))
print([task.train(i).text for i in range(5)])
"""
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outs) == 1


def test_splits_are_disjoint_and_repeat_themselves_in_a_copy() -> None:
    task = gym("basic_arithmetic", eval_size=20)
    copy = pickle.loads(pickle.dumps(task))
    train, held_out = [task.train(i) for i in range(40)], [task.eval(i) for i in range(20)]
    assert train == [copy.train(i) for i in range(40)]
    assert held_out == [copy.eval(i) for i in range(20)]
    assert len({p.text for p in held_out}) == 20
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert task.train(600) == copy.train(600)  # beyond one of the generator's datasets


def test_options_are_the_generators() -> None:
    task = gym("basic_arithmetic", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert all(len(task.train(i).text) < 60 for i in range(5))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("basic_arithmetik", {}, "reasoning_gym/basic_arithmetic"),
        ("basic_arithmetic", {"no_such": 1}, "no_such"),
        ("basic_arithmetic", {"min_terms": -1}, "min_terms"),
        ("basic_arithmetic", {"seed": 1}, "env.seed"),
        ("composite", {}, "name one of them"),
    ],
)
def test_what_cannot_be_made_is_told(name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_task_config(TextTaskConfig(task=f"reasoning_gym/{name}", options=options))


def test_freeze_keeps_what_json_loses() -> None:
    from fractions import Fraction

    value = {"a": (1, [2, (3,)]), "b": {1: "x", (1, 2): None}, "c": Fraction(1, 3), "(type)": "dict"}
    assert thaw(json.loads(json.dumps(freeze(value)))) == value
