"""Rewards that misbehave, each for real: what comes of a batch, and what is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.errors import UserError
from envs.text_tasks import TextTaskConfig, make_task
from rewards.child import ChildRewarder, UserFunction
from rewards.child_process import Limits
from rewards.functions import check_rewards, make_rewards
from rewards.reward import Failure, NotApplicable, Value
from rollouts.samples import Sample

HERE = Path(__file__).parent
TEXTS = ["a", "bbb", "cc"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def sample(text: str, **meta: Any) -> Sample:
    return Sample(
        id=text, group=0, index=0, prompt_ids=[1], completion_ids=[1] * len(text), finish="eos",
        logp_rollout=np.zeros(len(text), np.float32), meta=meta, prompt="p", completion=text,
    )  # fmt: skip


@pytest.fixture
def made() -> Iterator[list[ChildRewarder]]:
    rewarders: list[ChildRewarder] = []
    yield rewarders
    for rewarder in rewarders:
        rewarder.close()


@pytest.fixture
def rewarder(made: list[ChildRewarder]) -> Any:
    def make(name: str, deadline_s: float = 20.0, **limits: Any) -> ChildRewarder:
        made.append(ChildRewarder(UserFunction(f"hostile_rewards:{name}"), deadline_s, Limits(**limits)))
        return made[-1]

    return make


def score(rewarder: Any, **meta: Any) -> list[Any]:
    groups = [[sample(t, **meta) for t in TEXTS[:2]], [sample(t, **meta) for t in TEXTS[2:]]]
    results = rewarder.score(groups, None)
    assert [len(group) for group in results] == [2, 1]
    return [reward for group in results for reward in group]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_good_one_is_called_as_trl_does(rewarder: Any) -> None:
    assert score(rewarder("good")) == [Value(1.0), Value(3.0), Value(2.0)]


def test_columns_ids_and_loggers_are_handed_over_as_by_trl(rewarder: Any) -> None:
    counts = rewarder("counts")
    assert score(counts, weight=0.5, word="b") == [Value(0.5), Value(3.0), Value(1.0)]
    assert score(rewarder("later")) == [Value(1.0), Value(3.0), Value(2.0)]


def test_none_is_not_applicable(rewarder: Any) -> None:
    assert score(rewarder("abstains")) == [NotApplicable()] * 3


def test_a_numpy_bool_is_a_number(rewarder: Any) -> None:
    assert score(rewarder("numpy_bool")) == [Value(1.0)] * 3


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("raises", "ZeroDivisionError"),
        ("nan", "nan"),
        ("infinite", "infinite"),
        ("exits", "died"),
        ("crashes", "died"),
        ("closes_pipes", "died"),
        ("prints", "output"),
        ("unpicklable", "type"),
        ("enormous", "type"),
    ],
)
def test_a_fault_is_named_and_the_next_batch_is_asked_again(name: str, failure: str, rewarder: Any) -> None:
    hostile = rewarder(name)
    for _ in range(2):
        assert score(hostile) == [Failure(failure)] * 3


@pytest.mark.parametrize("name", ["hangs", "hangs_deaf"])
def test_a_deadline_is_kept(name: str, rewarder: Any) -> None:
    hostile = rewarder(name, deadline_s=1.0)
    started = time.monotonic()
    assert score(hostile) == [Failure("deadline")] * 3
    assert not hostile._child.alive
    assert time.monotonic() - started < 15.0


def test_memory_is_limited(rewarder: Any) -> None:
    assert score(rewarder("allocates", memory_mb=256)) == [Failure("memory")] * 3


def test_memory_of_all_processes_together_is_limited(rewarder: Any) -> None:
    # each fork alone stays below the limit
    assert score(rewarder("forks_and_allocates", memory_mb=256)) == [Failure("memory")] * 3


def test_forks_are_killed_with_it_daemons_too(rewarder: Any, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    assert score(rewarder("forks", deadline_s=2.0), pids=str(note)) == [Failure("deadline")] * 3
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert not any(running(pid) for pid in pids)


def test_nothing_that_comes_back_is_unpickled(rewarder: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert score(rewarder("bomb"), mark=str(mark)) == [Failure("type")] * 3
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "given"), [("too_few", "2 results"), ("too_many", "4 results"), ("a_number", "float")]
)
def test_a_wrong_shape_is_told_to_the_user(name: str, given: str, rewarder: Any) -> None:
    with pytest.raises(UserError, match=given) as told:
        score(rewarder(name))
    assert "a list of 3" in str(told.value)


def test_a_function_that_is_not_there_is_told_to_the_user(rewarder: Any) -> None:
    with pytest.raises(UserError, match="no_such"):
        score(rewarder("no_such"))


def test_a_column_that_cannot_travel_is_told_to_the_user(rewarder: Any) -> None:
    with pytest.raises(UserError, match="column"):
        score(rewarder("good"), picture=object())


def test_credentials_stay_here(rewarder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert score(rewarder("sees_token")) == [Value(0.0)] * 3


def test_a_killed_child_is_replaced(rewarder: Any) -> None:
    good = rewarder("good")
    assert score(good) == [Value(1.0), Value(3.0), Value(2.0)]
    os.kill(good._child._popen.pid, signal.SIGKILL)
    good._child._popen.wait()
    assert score(good) == [Value(1.0), Value(3.0), Value(2.0)]


def test_children_end_with_their_owner(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    code = f"""
import os, sys, threading
sys.path[:0] = [{str(HERE.parent.parent)!r}, {str(HERE)!r}]
from rewards.child_process import ChildProcess, Limits
child = ChildProcess("rewards.judges:user_function", {{"name": "hostile_rewards:forks"}}, Limits())
request = {{"n": 1, "prompts": [""], "completions": [""], "pids": [{str(note)!r}]}}
threading.Thread(target=child.call, args=(request,), kwargs={{"deadline_s": 60, "reply_bytes": 99}}).start()
import time
while not os.path.exists({str(note)!r}) or len(open({str(note)!r}).read().split()) < 2: time.sleep(0.05)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    pids = [int(pid) for pid in note.read_text().split()]
    limit = time.monotonic() + 10.0
    while any(running(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(running(pid) for pid in pids)


def test_rewards_by_name() -> None:
    task = make_task(TextTaskConfig(task="countdown"))
    with pytest.raises(UserError, match="exact"):
        check_rewards(["exakt"])
    with pytest.raises(UserError, match="no_such_module"):
        check_rewards(["no_such_module:f"])
    with pytest.raises(UserError, match="weight"):
        make_rewards(["exact"], [1.0, 2.0], task)
    (named,) = make_rewards(["hostile_rewards:good"], [0.5], task, deadline_s=20.0)
    assert (named.name, named.weight) == ("hostile_rewards:good", 0.5)
    try:
        assert score(named.rewarder) == [Value(1.0), Value(3.0), Value(2.0)]
    finally:
        named.rewarder.close()
