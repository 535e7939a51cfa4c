"""The Feed against hand recursion: order, versions, staleness, failures, credit, restarts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envs.errors import UserError
from rewards.reward import Failure, NotApplicable, Value
from rollouts.pool import RolloutError
from rollouts.samples import Request, Sample, SamplingParams
from trainers.credit import group_advantages, off_policy_weight
from trainers.feed import Feed, FeedConfig
from trainers.feed_batch import batch_state, load_batch


def seams(**filled: Any) -> Any:
    """An algorithm with no seam filled but these."""
    kept: dict[str, Any] = {
        "observe": None,
        "credit": None,
        "state_dict": dict,
        "load_state_dict": lambda s: s,
    }
    return SimpleNamespace(**{**kept, **filled})


class Words:
    """A tokenizer: one token a letter, none of them the end."""

    eos_token_id = -1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 97 for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + i) for i in ids)


class Letters:
    """A task of five prompts: a, b, c, d, e."""

    train_size: int | None = 5

    def train(self, i: int) -> Any:
        return SimpleNamespace(id=f"p{i}", text=chr(97 + i), messages=None, meta={"i": i})


class Echo:
    """A pool whose completions say the weights' step, the prompt and the sample's index."""

    def __init__(self) -> None:
        self.version, self.log = (0, 0), []

    def publish(self, packed: Any) -> None:
        self.version = packed.version
        self.log.append(("publish", packed.version))

    def sample(self, requests: list[Request]) -> list[Sample]:
        self.log.append(("sample", self.version, [r.prompt_ids[0] for r in requests]))
        return [
            Sample(
                id=f"{r.seed}-{i}",
                group=r.group,
                index=i,
                prompt_ids=r.prompt_ids,
                completion_ids=[self.version[1], r.prompt_ids[0], i],
                finish="eos",
                logp_rollout=np.array([-1.0, -2.0, -3.0], np.float32),
                version=self.version,
                meta=dict(r.meta),
            )
            for r in requests
            for i in range(r.n)
        ]


class Score:
    """A reward by a function of the sample."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def score(self, groups: list[list[Sample]], context: Any) -> Any:
        return [[self.function(s) for s in group] for group in groups]


def weights(step: int, attempt: int = 0) -> Any:
    return SimpleNamespace(version=(attempt, step))


def feed(function: Any = lambda s: Value(float(s.index)), pool: Any = None, **more: Any) -> Feed:
    cfg = {"seed": 7, "batches": 6, "prompts": 2, "samples": 3, "params": SamplingParams(), **more}
    rewards = [("r", 1.0, Score(function))]
    return Feed(FeedConfig(**cfg), Letters(), Words(), pool or Echo(), rewards, seams())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_batch_n_is_drawn_with_the_weights_of_batch_n_minus_staleness(staleness: int) -> None:
    f = feed(staleness=staleness)
    for number in range(6):
        f.publish(weights(number), number)
        versions = {s.version for s in f.rows(number)["samples"]}
        assert versions == {(0, max(0, number - staleness))}
    assert len([e for e in f.pool.log if e[0] == "sample"]) == 6  # none beyond the plan
    f.close()


def test_prompts_are_whole_shuffled_passes() -> None:
    f = feed(batches=10)
    seen = []
    for number in range(10):
        f.publish(weights(number), number)
        seen += [s.prompt_ids[0] for s in f.rows(number)["samples"]][::3]
    passes = [seen[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(p) == [0, 1, 2, 3, 4] for p in passes)
    assert len({tuple(p) for p in passes}) > 1
    again = feed(batches=10)
    again.publish(weights(0), 0)
    assert [s.prompt_ids[0] for s in again.rows(0)["samples"]][::3] == seen[:2]
    f.close()
    again.close()


def test_advantages_and_items_by_hand() -> None:
    f = feed()
    f.publish(weights(0), 0)
    rows = f.rows(0)
    # rewards 0, 1, 2: mean 1, unbiased std 1
    by_hand = [-1 / 1.0001, 0.0, 1 / 1.0001] * 2
    assert [c.tolist() for c in rows["credit"]] == [pytest.approx([a] * 3) for a in by_hand]
    assert rows["items"] == 6 * 3
    assert rows["metrics"]["reward"] == 1.0
    assert rows["metrics"]["frac_reward_zero_std"] == 0.0
    assert rows["metrics"]["completion_length"] == 3.0
    f.close()


def test_a_failed_sample_leaves_group_and_denominator() -> None:
    f = feed(lambda s: Failure("timeout") if s.index == 0 else Value(float(s.index)), max_failure_rate=0.5)
    f.publish(weights(0), 0)
    rows = f.rows(0)
    std = np.sqrt(0.5)  # of rewards 1 and 2
    by_hand = [0.0, -0.5 / (std + 1e-4), 0.5 / (std + 1e-4)] * 2
    assert [c[0] for c in rows["credit"]] == pytest.approx(by_hand, rel=1e-6)
    assert rows["items"] == 4 * 3
    assert [s.mask is not None and not s.mask.any() for s in rows["samples"]] == [True, False, False] * 2
    assert rows["metrics"]["reward_failures"] == pytest.approx(1 / 3)
    f.close()


def test_a_reward_that_does_not_apply_is_left_out() -> None:
    f = feed(lambda s: NotApplicable() if s.index == 2 else Value(float(s.index)), max_failure_rate=1.0)
    f.publish(weights(0), 0)
    rows = f.rows(0)
    assert rows["metrics"]["reward"] == 0.5
    assert not rows["samples"][2].mask.any()
    f.close()


def test_too_many_failures_stop_the_run() -> None:
    f = feed(lambda s: Failure("raised KeyError"), samples=20, max_failure_rate=0.5)
    f.publish(weights(0), 0)
    with pytest.raises(UserError, match=r"40 of 40 samples failed[\s\S]*KeyError[\s\S]*max_failure_rate=0.5"):
        f.rows(0)
    f.close()


def test_a_reward_of_the_wrong_shape_is_told() -> None:
    f = feed()
    f.rewards = [("bad", 1.0, SimpleNamespace(score=lambda groups, context: [[Value(1.0)]] * 2))]
    f.publish(weights(0), 0)
    with pytest.raises(
        UserError, match=r"'bad' must give one result per sample[\s\S]*\[1, 1\][\s\S]*\[3, 3\]"
    ):
        f.rows(0)
    f.close()


def test_equal_rewards_are_warned_of() -> None:
    f = feed(lambda s: Value(1.0), equal_rewards_warning=2)
    notices = []
    for number in range(4):
        f.publish(weights(number), number)
        notices.append(f.rows(number)["notices"])
    notices[0] = [n for n in notices[0] if not n.startswith("from the first batch")]
    assert [len(n) for n in notices] == [0, 1, 0, 1]
    assert "samples.jsonl" in notices[1][0]
    f.close()


def test_observe_comes_before_credit_and_whole_groups_arrive() -> None:
    def credit(groups: Any, advantages: np.ndarray) -> list[np.ndarray]:
        assert [len(g) for g in groups] == [3, 3]
        return [
            s.streams["seen"] * advantages.reshape(-1)[i] for i, s in enumerate(s for g in groups for s in g)
        ]

    f = feed()
    f.algorithm = seams(observe=True, credit=credit)
    f.publish(weights(0), 0)
    with pytest.raises(RuntimeError, match="not every rank"):
        f.rows(0, 0, 2)
    for rank in (1, 0):
        mine = f.samples(0, rank, 2)
        f.observed(0, rank, 2, {"seen": [np.full(3, 10.0 * rank + s.index) for s in mine]})
    rows = f.rows(0, 1, 2)
    a = 1 / 1.0001
    assert [c[0] for c in rows["credit"]] == pytest.approx([-10 * a, 0.0, 12 * a])
    f.close()


def test_credit_must_be_finite() -> None:
    f = feed()
    f.algorithm = seams(credit=lambda groups, advantages: [np.full(3, np.nan)] * 6)
    f.publish(weights(0), 0)
    with pytest.raises(UserError, match="one finite number a token"):
        f.rows(0)
    f.close()


def test_drawing_ahead_does_not_wait_for_the_learner() -> None:
    drawn = threading.Event()

    class Slow(Echo):
        def sample(self, requests: list[Request]) -> list[Sample]:
            samples = super().sample(requests)
            if len([e for e in self.log if e[0] == "sample"]) == 2:
                drawn.set()
            return samples

    f = feed(pool=Slow(), staleness=1)
    f.publish(weights(0), 0)
    f.rows(0)
    assert drawn.wait(5)  # batch 1 came while the learner has published nothing more
    f.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_feed_gives_what_an_unbroken_one_gives(staleness: int) -> None:
    def run(f: Feed, first: int, last: int) -> list[Any]:
        found = []
        for number in range(first, last):
            f.publish(weights(number, attempt=int(first > 0)), number)
            rows = f.rows(number)
            found.append([(s.id, s.version[1], s.completion_ids) for s in rows["samples"]])
            found.append([c.tolist() for c in rows["credit"]])
        return found

    whole = feed(staleness=staleness)
    unbroken = run(whole, 0, 6)
    first = feed(staleness=staleness)
    part = run(first, 0, 3)
    first.publish(weights(3), 3)  # as at the end of step 3, before its checkpoint
    state = first.state_dict()
    assert [b["number"] for b in state["batches"]] == [3, 4][: 1 + staleness]
    second = feed(staleness=staleness)
    second.start(1, state)
    assert part + run(second, 3, 6) == unbroken
    for f in (whole, first, second):
        f.close()


def test_a_new_attempt_starts_over_on_the_feed_that_is_there(tmp_path: Path) -> None:
    """Workers were replaced, the Feed lives: what the old ones asked for is gone, nothing counts twice."""
    path = tmp_path / "samples.jsonl"
    score = lambda s: Failure("odd") if s.index == 1 else Value(float(s.index))  # noqa: E731
    options: dict[str, Any] = {"staleness": 1, "max_failure_rate": 1.0, "samples_logged": 1}
    f = feed(score, samples_path=str(path), **options)
    f.start(0)
    for number in range(4):
        f.publish(weights(number), number)
        f.rows(number)
        if number == 1:
            state = f.state_dict()
            counts = (f._failed, f._counted)
    f.start(1, state)
    assert (f._failed, f._counted) == counts == (6, 18)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    f.publish(weights(3, attempt=0), 3)  # of a worker that does not know yet: dropped
    assert sorted(f._buffer) == [1, 2]
    f.publish(weights(2, attempt=1), 2)
    f.rows(3)
    assert {s.version for s in f.rows(3)["samples"]} == {(1, 2)}
    assert {s.version for s in f.rows(2)["samples"]} == {(0, 1)}
    assert [e[1] for e in f.pool.log if e[0] == "publish"] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)]
    f.start(2)  # without a checkpoint: from the first batch
    assert path.read_text() == ""
    f.publish(weights(0, attempt=2), 0)
    assert {s.version for s in f.rows(0)["samples"]} == {(2, 0)}
    with pytest.raises(RuntimeError, match="attempt 1 starts after attempt 2"):
        f.start(1)
    f.close()


def test_a_new_attempt_forgets_the_error_of_the_old_one() -> None:
    class Flaky(Echo):
        broken = True

        def sample(self, requests: list[Request]) -> list[Sample]:
            if self.broken:
                raise RolloutError("worker 0 did not answer 2 requests within 3 s")
            return super().sample(requests)

    f = feed(pool=Flaky())
    f.start(0)
    f.publish(weights(0), 0)
    with pytest.raises(UserError, match="worker 0 did not answer"):
        f.rows(0)
    f.pool.broken = False
    f.start(1)
    f.publish(weights(0, attempt=1), 0)
    assert len(f.rows(0)["samples"]) == 6
    f.close()


def test_requests_ask_for_the_weights_that_were_published_last() -> None:
    asked = []

    class Asked(Echo):
        def sample(self, requests: list[Request]) -> list[Sample]:
            asked.extend(r.min_version for r in requests)
            return super().sample(requests)

    f = feed(pool=Asked(), staleness=1)
    for number in range(2):
        f.publish(weights(number), number)
        f.rows(number)
    f.state_dict()
    assert asked == [(0, 0)] * 4 + [(0, 1)] * 2
    f.close()


def test_completions_that_were_cut_off_are_judged_but_not_learned_from() -> None:
    class Cut(Echo):
        def sample(self, requests: list[Request]) -> list[Sample]:
            samples = super().sample(requests)
            for sample in samples:
                sample.finish = "length" if sample.index == 2 else "eos"
            return samples

    f = feed(pool=Cut(), mask_cut=True)
    f.publish(weights(0), 0)
    rows = f.rows(0)
    assert rows["items"] == 2 * 2 * 3
    assert [c[0] for c in rows["credit"]][:2] == pytest.approx([-1 / 1.0001, 0.0])  # mean of three
    assert rows["metrics"]["completions_cut"] == pytest.approx(1 / 3)
    assert rows["metrics"]["reward_failures"] == 0.0
    f.close()


def test_the_first_samples_are_shown_with_the_parts_of_their_reward() -> None:
    f = feed(lambda s: Value(0.5 * s.index, {"format": 1.0}))
    f.publish(weights(0), 0)
    (notice,) = f.rows(0)["notices"]
    letter = f.rows(0)["samples"][0].prompt
    lines = notice.splitlines()
    assert [line.split(" · ")[0] for line in lines if "reward" in line] == [
        "  reward 1: r 1 (format 1)",
        "  reward 0.500: r 0.500 (format 1)",
        "  reward 0: r 0 (format 1)",
    ]
    assert lines[2:4] == [f"    prompt      {letter}", f"    completion  a{letter}c"]
    f.close()


def test_the_algorithm_s_state_travels_with_the_feed() -> None:
    f = feed()
    f.algorithm = seams(state_dict=lambda: {"seen": 3})
    f.start(0)
    f.publish(weights(0), 0)
    state = f.state_dict()
    got = []
    f.algorithm = seams(load_state_dict=got.append)
    f.start(1, state)
    assert got == [{"seen": 3}]
    f.close()


def test_a_broken_publication_reaches_the_learner() -> None:
    class Broken(Echo):
        def publish(self, packed: Any) -> None:
            raise OSError("no space")

    f = feed(pool=Broken())
    f.publish(weights(0), 0)
    with pytest.raises(OSError, match="no space"):
        f.rows(0)
    f.close()


def test_a_batch_survives_the_checkpoint() -> None:
    f = feed()
    f.publish(weights(0), 0)
    f.rows(0)
    batch = f._buffer[0].result()
    batch.groups[0][0].streams["x"] = np.arange(6.0).reshape(3, 2)
    again = load_batch(batch_state(batch))
    assert again.metrics == batch.metrics
    for a, b in zip(again.samples, batch.samples, strict=True):
        assert (a.id, a.version, a.prompt, a.completion, a.meta) == (
            b.id,
            b.version,
            b.prompt,
            b.completion,
            b.meta,
        )
        assert a.completion_ids == b.completion_ids
        assert all(np.array_equal(a.streams[k], b.streams[k]) for k in b.streams)
    f.close()


def test_group_advantages_by_hand() -> None:
    rewards = np.array([[1.0, 2.0, 4.0], [5.0, 5.0, 5.0], [0.0, 9.0, 3.0]])
    valid = np.array([[True] * 3, [True] * 3, [False, True, False]])
    none = group_advantages(rewards, valid, "none")
    assert none[0] == pytest.approx(np.array([1, 2, 4]) - 7 / 3, abs=1e-6)
    assert none[1:].tolist() == [[0] * 3] * 2
    std = np.std([1, 2, 4], ddof=1)
    grouped = group_advantages(rewards, valid, "group")
    assert grouped[0] == pytest.approx((np.array([1, 2, 4]) - 7 / 3) / (std + 1e-4), abs=1e-6)
    assert grouped[1:].tolist() == [[0] * 3] * 2
    std = np.std([1, 2, 4, 5, 5, 5, 9], ddof=1)
    batch = group_advantages(rewards, valid, "batch")
    assert batch[0] == pytest.approx((np.array([1, 2, 4]) - 7 / 3) / (std + 1e-4), abs=1e-6)


def test_off_policy_weight_is_truncated() -> None:
    weight = off_policy_weight(np.log([0.5, 0.9, 0.1]), np.log([0.25, 0.1, 0.2]), cap=2.0)
    assert weight == pytest.approx([2.0, 2.0, 0.5])
