"""The pool with an engine whose answers and faults are ordered: order, numbers, deaths, deadlines, bounds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from envs.errors import UserError
from rollouts.engine import EngineSpec
from rollouts.pool import QueueFullError, RolloutError, RolloutPool
from rollouts.samples import Request, Sample
from rollouts.store import send, store
from rollouts.weights import WeightsError, pack

TOY = "tests.rollouts.toy_engine:ToyEngine"
WAIT_S = 120  # a worker's process may take long to start on a busy machine


def toy(folder: Path, **options: Any) -> EngineSpec:
    return EngineSpec(model_path="toy", kind=TOY, options={"folder": str(folder), **options})


def requests(count: int, n: int = 2) -> list[Request]:
    return [Request(prompt_ids=[5], n=n, seed=(0, i), group=i) for i in range(count)]


def expected(count: int, weight: int, n: int = 2) -> list[list[int]]:
    return [[i, j, weight] for i in range(count) for j in range(n)]


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [s.completion_ids for s in samples]


def weights(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(float(value))}


@pytest.fixture
def make_pool(ray: Any, tmp_path: Path) -> Iterator[Callable[..., RolloutPool]]:
    pools = []

    def make(options: dict[str, Any] | None = None, **more: Any) -> RolloutPool:
        more = {"num_workers": 1, "cpus_per_worker": 0, "deadline_s": WAIT_S, **more}
        pools.append(RolloutPool(toy(tmp_path, **(options or {})), **more))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


# --- in this process


def test_an_engine_in_this_process(tmp_path: Path) -> None:
    pool = RolloutPool(toy(tmp_path))
    assert tokens(pool.sample(requests(3))) == expected(3, 0)
    pool.publish(pack(weights(7), (0, 1)))
    samples = pool.sample(requests(2))
    assert tokens(samples) == expected(2, 7)
    assert {s.version for s in samples} == {pool.version} == {(0, 1)}
    assert pool.sample([]) == []
    counts = pool.metrics()
    assert (counts["requests"], counts["samples"], counts["tokens"]) == (5, 10, 30)
    assert counts["published_bytes"] == 64  # one float, padded
    with pytest.raises(UserError, match="cannot be shared"):
        pool.handle()


def test_versions_only_grow(tmp_path: Path) -> None:
    pool = RolloutPool(toy(tmp_path))
    pool.publish(pack(weights(1), (0, 0)))  # before the first step
    pool.publish(pack(weights(2), (0, 5)))
    for old in ((0, 5), (0, 4)):
        with pytest.raises(WeightsError, match=r"not newer than \(0, 5\)"):
            pool.publish(pack(weights(3), old))
    pool.publish(pack(weights(4), (1, 2)))  # a restart goes on from an earlier step
    assert tokens(pool.sample(requests(1, n=1))) == [[0, 0, 4]]


def test_newer_weights_than_there_are_cannot_be_had(tmp_path: Path) -> None:
    request = Request(prompt_ids=[5], min_version=(0, 9))
    with pytest.raises(WeightsError, match=r"has weights \(0, 0\), \(0, 9\) were asked for"):
        RolloutPool(toy(tmp_path)).sample([request])


def test_bounds_on_number_and_bytes(tmp_path: Path) -> None:
    few = RolloutPool(toy(tmp_path), max_queue_requests=3)
    assert len(few.sample(requests(3))) == 6
    with pytest.raises(QueueFullError, match=r"asked 4 requests .* takes 3 of"):
        few.sample(requests(4))
    small = RolloutPool(toy(tmp_path), max_queue_bytes=10_000)
    with pytest.raises(QueueFullError, match=r"takes 4096 of 10,000"):
        small.sample([Request(prompt_ids=[1] * 2000)])
    assert len(small.sample(requests(1))) == 2  # nothing is left counted


def test_what_waits_is_answered_together_and_a_bad_caller_pays_alone(tmp_path: Path) -> None:
    pool = RolloutPool(toy(tmp_path, batches_callers=True, seconds=0.3))
    found: dict[int, Any] = {}

    def call(i: int, bad: bool) -> None:
        try:
            found[i] = pool.sample([Request(prompt_ids=[5], seed=(0, i), meta={"bad": bad})])
        except UserError as error:
            found[i] = error

    threads = [threading.Thread(target=call, args=(i, i == 2)) for i in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # the first is being answered when the others come
    for thread in threads:
        thread.join()
    assert isinstance(found[2], UserError)
    assert [found[i][0].completion_ids for i in (0, 1, 3)] == [[0, 0, 0], [1, 0, 0], [3, 0, 0]]
    assert found[0][0].meta["calls"] == [1]
    assert found[1][0].meta["calls"] == [1, 3, 1]  # all three failed, then each alone


# --- in Ray actors


def test_answers_come_in_the_requests_order_and_carry_the_version(make_pool: Any) -> None:
    pool = make_pool(num_workers=2)
    samples = pool.sample(requests(5))
    assert tokens(samples) == expected(5, 0)
    assert len({s.meta["pid"] for s in samples}) == 2
    pool.publish(send(weights(3), (0, 1)))
    pool.publish(pack(weights(4), (0, 2)))
    samples = pool.sample(requests(5))
    assert tokens(samples) == expected(5, 4)
    assert {s.version for s in samples} == {(0, 2)}
    assert tokens(pool.sample(requests(1))) == expected(1, 4)


@pytest.mark.parametrize("version", [None, (0, 3)])
def test_a_worker_killed_in_generation_is_replaced_and_its_requests_drawn_again(
    make_pool: Any, tmp_path: Path, version: Any
) -> None:
    pool = make_pool(num_workers=2)
    weight = 0
    if version:
        weight = 6
        pool.publish(send(weights(weight), version))
    before = {s.meta["pid"] for s in pool.sample(requests(4))}
    (tmp_path / "die in generate").touch()
    samples = pool.sample(requests(4))
    assert tokens(samples) == expected(4, weight)
    assert {s.version for s in samples} == {version or (0, 0)}
    assert len({s.meta["pid"] for s in samples} - before) == 1
    counts = pool.metrics()
    assert (counts["redrawn"], counts["samples"]) == (1, 16)


def test_a_worker_killed_between_calls_comes_back_with_the_newest_weights(make_pool: Any) -> None:
    pool = make_pool()
    pool.publish(send(weights(8), (0, 1)))
    pid = pool.sample(requests(1))[0].meta["pid"]
    os.kill(pid, signal.SIGKILL)
    sample = pool.sample(requests(1, n=1))[0]
    assert (sample.completion_ids, sample.version) == ([0, 0, 8], (0, 1))
    assert sample.meta["pid"] != pid


def test_a_worker_killed_while_it_loads_loads_again(make_pool: Any, tmp_path: Path) -> None:
    pool = make_pool(num_workers=2)
    (tmp_path / "die in load").touch()
    pool.publish(send(weights(2), (0, 1)))
    assert tokens(pool.sample(requests(4))) == expected(4, 2)
    assert pool.metrics()["redrawn"] == 1


def test_a_worker_that_hangs_is_named(make_pool: Any, tmp_path: Path) -> None:
    pool = make_pool(num_workers=2)
    pool.limits = type(pool.limits)(deadline_s=3)
    (tmp_path / "hang in generate").touch()
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"^rollout worker [01] did not answer within 3 s"):
        pool.sample(requests(4))
    assert time.monotonic() - started < 30


def test_a_worker_that_hangs_while_it_loads_is_named(make_pool: Any, tmp_path: Path) -> None:
    pool = make_pool()
    pool.limits = type(pool.limits)(deadline_s=3)
    (tmp_path / "hang in load").touch()
    with pytest.raises(RolloutError, match=r"rollout worker 0 did not take over weights \(0, 1\) within 3 s"):
        pool.publish(send(weights(1), (0, 1)))
    assert pool.version == (0, 0)


def test_a_worker_that_may_not_come_back_is_an_error(make_pool: Any, tmp_path: Path) -> None:
    pool = make_pool(max_restarts=0)
    (tmp_path / "die in generate").touch()
    with pytest.raises(RolloutError, match="rollout worker 0 died and is not started again"):
        pool.sample(requests(1))


def test_errors_of_the_engine_are_told_and_do_no_harm(make_pool: Any, tmp_path: Path) -> None:
    pool = make_pool()
    with pytest.raises(UserError, match="a bad request"):
        pool.sample([Request(prompt_ids=[5], meta={"bad": True})])
    (tmp_path / "raise in generate").touch()
    with pytest.raises(ZeroDivisionError, match="ordered"):
        pool.sample(requests(1))
    assert tokens(pool.sample(requests(1))) == expected(1, 0)
    spec = EngineSpec(model_path="missing", kind=TOY)
    with pytest.raises(RolloutError, match=r"no model here"):
        RolloutPool(spec, num_workers=1, cpus_per_worker=0, deadline_s=WAIT_S, max_restarts=0)


def test_a_damaged_publication_is_refused_and_the_old_one_stays(make_pool: Any) -> None:
    pool = make_pool()
    pool.publish(send(weights(1), (0, 1)))
    broken = pack(weights(2), (0, 2))
    broken.chunks[0][1] ^= 1
    with pytest.raises(WeightsError, match=r"weights \(0, 2\) arrived with another checksum"):
        pool.publish(store(broken))
    assert (pool.version, tokens(pool.sample(requests(1)))) == ((0, 1), expected(1, 1))
    pool.publish(send(weights(2), (0, 2)))  # sent again, whole
    assert tokens(pool.sample(requests(1))) == expected(1, 2)


def test_one_worker_s_queue_is_bounded_for_all_its_callers(make_pool: Any) -> None:
    pool = make_pool({"seconds": 1.0}, max_queue_requests=5)
    handles = [pool.handle() for _ in range(3)]
    found: list[Any] = [None] * 3

    def call(i: int) -> None:
        try:
            found[i] = handles[i].sample(requests(2))
        except QueueFullError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [f for f in found if isinstance(f, str)]
    assert len(refused) == 1
    assert "rollout worker 0 was asked 2 requests" in refused[0]
    assert "while 4 of" in refused[0]
    assert [tokens(f) for f in found if not isinstance(f, str)] == [expected(2, 0)] * 2


def test_other_processes_sample_and_publish_through_a_handle(make_pool: Any, ray: Any) -> None:
    pool = make_pool()
    pool.publish(send(weights(1), (0, 1)))

    @ray.remote(num_cpus=0)
    def elsewhere(client: Any) -> Any:
        client.publish(send(weights(5), (0, 2)))
        return client.sample(requests(2)), client.version

    samples, version = ray.get(elsewhere.remote(pool.handle()), timeout=WAIT_S)
    assert (tokens(samples), version) == (expected(2, 5), (0, 2))
    assert tokens(pool.sample(requests(2))) == expected(2, 5)


def wait_until_lost(ray: Any, stored: Any) -> None:
    """Until Ray has noticed that the process which sent the weights is dead."""
    limit = time.monotonic() + WAIT_S
    while time.monotonic() < limit:
        try:
            stored.fetch(1)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return
        time.sleep(0.1)
    raise AssertionError("the weights outlived the process that sent them")


def test_weights_whose_sender_died_stay_with_the_workers_that_have_them(make_pool: Any, ray: Any) -> None:
    pool = make_pool()

    @ray.remote(num_cpus=0)
    class Learner:
        def publish(self, client: Any) -> int:
            client.publish(send(weights(5), (0, 2)))
            return os.getpid()

    learner = Learner.remote()
    pid = ray.get(learner.publish.remote(pool.handle()), timeout=WAIT_S)
    os.kill(pid, signal.SIGKILL)
    pool.version = (0, 2)
    samples = pool.sample(requests(1))
    assert tokens(samples) == expected(1, 5)
    wait_until_lost(ray, ray.get(pool.board.newest.remote()))
    os.kill(samples[0].meta["pid"], signal.SIGKILL)
    with pytest.raises(WeightsError, match=r"rollout worker 0 has weights \(0, 0\), \(0, 2\) were asked for"):
        pool.sample(requests(1))
    pool.publish(send(weights(6), (1, 0)))  # the learner's next start
    assert tokens(pool.sample(requests(1))) == expected(1, 6)
