"""The rollout pool: generation engines in this process or in Ray actors, shared by everybody who samples.

    pool = RolloutPool(EngineSpec(model_path=...), num_workers=2)
    samples = pool.sample([Request(...), ...])
    pool.publish(send(named_tensors, version))

A worker that dies is started again by Ray with the newest weights, and what it was asked is asked again.
Every wait has a deadline. Knows no reward and no learner.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from envs.errors import UserError
from rollouts.engine import EngineSpec, make_engine
from rollouts.samples import Request, Sample, Version
from rollouts.store import StoredWeights, store
from rollouts.weights import PackedWeights, Transfer, WeightsError, accept

CALLERS = 64  # of one worker at a time; more wait in Ray
POLL_S = 0.2


class RolloutError(RuntimeError):
    """Samples or weights that did not come: who was waited for, for what, and how long."""


class QueueFullError(RolloutError):
    """More is waiting than a worker's bounds allow."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """deadline_s: of every wait; the others: what may wait at one worker, from all its callers."""

    deadline_s: float = 600.0
    max_queue_requests: int = 4096
    max_queue_bytes: int = 64 << 20


@dataclass
class _Waiting:
    """Requests of one caller that wait for the worker's engine."""

    requests: list[Request]
    answer: Future[list[list[Sample]]]


class Worker:
    """One engine and the queue before it; a Ray actor, or a plain object in the caller's process.

    With an engine that batches callers, whatever waits when it becomes free is answered together.
    """

    def __init__(self, spec: EngineSpec, name: str, limits: Limits, board: Any = None) -> None:
        self.name, self.limits, self.board = name, limits, board
        self.engine = make_engine(spec)
        self._busy = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._counting = threading.Lock()
        self._requests = self._bytes = 0
        if board is not None:
            self.renew()

    def renew(self) -> Version:
        """Take the newest weights from the board, as after a restart.

        If they died with the learner that sent them nothing changes; its next start sends them anew.
        """
        import ray

        newest = ray.get(self.board.newest.remote(), timeout=self.limits.deadline_s)
        if newest is not None and newest.version != self.engine.version:
            with contextlib.suppress(ray.exceptions.ObjectLostError):
                self.load(newest.fetch(self.limits.deadline_s))
        return self.engine.version

    def load(self, packed: PackedWeights) -> Version:
        """Verify and take over. Raises WeightsError; then the weights are what they were."""
        transfer = Transfer(packed.version, self.name, self.limits.deadline_s)
        accept(packed, self.engine, transfer, self._busy)
        return self.engine.version

    def generate(self, requests: list[Request], at_least: Version = (0, 0)) -> list[list[Sample]]:
        """The samples of every request.

        Older weights than `at_least` or a request's `min_version` are renewed first. Raises QueueFullError,
        WeightsError when the weights can't be had, and what the engine raises.
        """
        with self._admitted(requests):
            wanted = max([at_least, *(r.min_version for r in requests if r.min_version is not None)])
            if self.engine.version < wanted and self.board is not None:
                self.renew()
            if self.engine.version < wanted:
                raise WeightsError(f"{self.name} has weights {self.engine.version}, {wanted} were asked for")
            if self.engine.batches_callers:
                return self._together(requests)
            with self._busy:
                return self.engine.generate(requests)

    @contextlib.contextmanager
    def _admitted(self, requests: list[Request]) -> Iterator[None]:
        """Count the requests as waiting or being answered."""
        count, size, limits = len(requests), sum(request.nbytes() for request in requests), self.limits
        with self._counting:
            if (
                self._requests + count > limits.max_queue_requests
                or self._bytes + size > limits.max_queue_bytes
            ):
                raise QueueFullError(
                    f"{self.name} was asked {count} requests of {size:,} bytes while {self._requests} of "
                    f"{self._bytes:,} were waiting; it takes {limits.max_queue_requests} of "
                    f"{limits.max_queue_bytes:,}"
                )
            self._requests += count
            self._bytes += size
        try:
            yield
        finally:
            with self._counting:
                self._requests -= count
                self._bytes -= size

    def _together(self, requests: list[Request]) -> list[list[Sample]]:
        mine = _Waiting(requests, Future())
        self._waiting.append(mine)
        with self._busy:
            if not mine.answer.done():  # otherwise it was answered with those before it
                together = []
                while self._waiting:
                    together.append(self._waiting.popleft())
                self._answer(together)
        return mine.answer.result()

    def _answer(self, together: list[_Waiting]) -> None:
        try:
            answers = self.engine.generate([r for waiting in together for r in waiting.requests])
        except Exception as error:
            if len(together) == 1:
                together[0].answer.set_exception(error)
                return
            for waiting in together:  # the fault is one caller's; the others must not pay for it
                self._answer([waiting])
            return
        at = 0
        for waiting in together:
            waiting.answer.set_result(answers[at : at + len(waiting.requests)])
            at += len(waiting.requests)

    def pid(self) -> int:
        """The process it runs in."""
        return os.getpid()


class Board:
    """A small Ray actor that knows the newest weights: what a worker that comes back asks."""

    def __init__(self) -> None:
        self._newest: StoredWeights | None = None

    def put(self, weights: StoredWeights) -> None:
        """Keep a published object alive."""
        self._newest = weights

    def newest(self) -> StoredWeights | None:
        """The newest version, or None."""
        return self._newest


@dataclass
class _Counts:
    """What one client has asked for since it was made."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    redrawn: int = 0
    sample_seconds: float = 0.0
    publish_seconds: float = 0.0
    published_bytes: int = 0


@dataclass(kw_only=True)
class PoolClient:
    """What samples and publishes. Picklable when the workers are remote.

    workers: Ray actors, or one `Worker` in this process; board: None in that case.
    """

    workers: list[Any]
    board: Any = None
    limits: Limits = field(default_factory=Limits)
    version: Version = (0, 0)  # that this client knows of; samples are of this one or newer
    _counts: _Counts = field(default_factory=_Counts)

    def sample(self, requests: list[Request]) -> list[Sample]:
        """`n` samples of every request, requests in their order.

        Raises QueueFullError over the bounds, RolloutError when the deadline passes or a worker has died too
        often, UserError for a request that no engine can serve.
        """
        for request in requests:
            request.check()
        started = time.monotonic()
        if self.board is None:
            answers = self.workers[0].generate(requests, self.version)
        else:
            answers = self._sample_remote(requests)
        samples = [sample for answer in answers for sample in answer]
        self._counts.requests += len(requests)
        self._counts.samples += len(samples)
        self._counts.tokens += sum(len(s.completion_ids) for s in samples)
        self._counts.sample_seconds += time.monotonic() - started
        return samples

    def publish(self, weights: PackedWeights | StoredWeights) -> None:
        """Give new weights to every worker and wait until all have them.

        Raises WeightsError when a version is not newer than the one before, does not fit the model or arrives
        broken, RolloutError when a worker does not answer in time.
        """
        if weights.version <= self.version and self.version != (0, 0):
            raise WeightsError(f"weights {weights.version} are not newer than {self.version}")
        started = time.monotonic()
        if self.board is None:
            here = weights.fetch(self.limits.deadline_s) if isinstance(weights, StoredWeights) else weights
            self.workers[0].load(here)
        else:
            self._publish_remote(weights if isinstance(weights, StoredWeights) else store(weights))
        self.version = weights.version
        self._counts.publish_seconds += time.monotonic() - started
        self._counts.published_bytes += weights.nbytes

    def metrics(self) -> dict[str, float]:
        """Counts and seconds since this client was made."""
        return asdict(self._counts)

    def _publish_remote(self, weights: StoredWeights) -> None:
        import ray

        ray.get(self.board.put.remote(weights), timeout=self.limits.deadline_s)
        ref = weights.ref[0]
        self._gather(
            self._all(lambda worker: worker.load.remote(ref)), f"take over weights {weights.version}"
        )

    def _all(self, ask: Callable[[Any], Any]) -> list[tuple[int, Callable[[Any], Any]]]:
        return [(index, ask) for index in range(len(self.workers))]

    def _sample_remote(self, requests: list[Request]) -> list[list[Sample]]:
        """Every worker gets an equal part; how it is cut does not change a deterministic engine's samples."""
        parts = [list(range(i, len(requests), len(self.workers))) for i in range(len(self.workers))]
        asks = [(index, self._ask([requests[i] for i in part])) for index, part in enumerate(parts) if part]
        answers: list[list[Sample]] = [[] for _ in requests]
        for (index, _), found in zip(asks, self._gather(asks, "answer")):
            for i, answer in zip(parts[index], found):
                answers[i] = answer
        return answers

    def _ask(self, requests: list[Request]) -> Callable[[Any], Any]:
        return lambda worker: worker.generate.remote(requests, self.version)

    def _gather(self, asks: list[tuple[int, Callable[[Any], Any]]], what: str) -> list[Any]:
        """The answers of what is asked of workers by index; asked again where one died before it answered."""
        import ray

        limit = time.monotonic() + self.limits.deadline_s
        flying = {ask(self.workers[index]): i for i, (index, ask) in enumerate(asks)}
        answers: list[Any] = [None] * len(asks)
        while flying:
            left = max(0.0, limit - time.monotonic())
            ready, _ = ray.wait(list(flying), num_returns=1, timeout=left)
            if not ready:
                raise self._late(sorted({asks[i][0] for i in flying.values()}), what)
            i = flying.pop(ready[0])
            index, ask = asks[i]
            try:
                answers[i] = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
                self._await_return(index, what, limit)
                self._counts.redrawn += 1
                flying[ask(self.workers[index])] = i
        return answers

    def _await_return(self, index: int, what: str, limit: float) -> None:
        """Wait until a worker that died answers again. Raises RolloutError when it will not."""
        import ray

        while True:
            try:
                ray.get(self.workers[index].pid.remote(), timeout=max(0.0, limit - time.monotonic()))
                return
            except ray.exceptions.ActorUnavailableError:
                time.sleep(POLL_S)  # it is being started
            except ray.exceptions.GetTimeoutError:
                raise self._late([index], what) from None
            except ray.exceptions.RayActorError as error:
                raise RolloutError(
                    f"rollout worker {index} died and is not started again (rollout.max_restarts): {error}"
                ) from error

    def _late(self, indices: list[int], what: str) -> RolloutError:
        names = ", ".join(f"rollout worker {index}" for index in indices)
        return RolloutError(
            f"{names} did not {what} within {self.limits.deadline_s:g} s (rollout.deadline_s)"
        )


def _cause(error: Any) -> BaseException:
    """What a worker raised, if it is one of the errors that this module speaks of."""
    known = isinstance(error.cause, UserError | RolloutError | WeightsError)
    return error.cause if known else error


class RolloutPool(PoolClient):
    """The pool's owner: makes the workers and ends them. See the module.

    num_workers 0 holds one engine in this process, which needs no Ray. `max_restarts` is for each worker.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        num_workers: int = 0,
        deadline_s: float = 600.0,
        max_restarts: int = 10,
        max_queue_requests: int = 4096,
        max_queue_bytes: int = 64 << 20,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
    ) -> None:
        spec.check()
        if num_workers < 0:
            raise UserError("rollout.num_workers must be at least 0", given=num_workers)
        limits = Limits(
            deadline_s=deadline_s, max_queue_requests=max_queue_requests, max_queue_bytes=max_queue_bytes
        )
        if num_workers == 0:
            super().__init__(workers=[Worker(spec, "the engine of this process", limits)], limits=limits)
            return
        import ray

        board = ray.remote(Board).options(num_cpus=0).remote()
        make = ray.remote(Worker).options(
            num_cpus=cpus_per_worker,
            num_gpus=gpus_per_worker,
            max_restarts=max_restarts,
            max_task_retries=0,  # the client asks again, so that it can count
            max_concurrency=CALLERS,
        )
        workers = [make.remote(spec, f"rollout worker {i}", limits, board) for i in range(num_workers)]
        super().__init__(workers=workers, board=board, limits=limits)
        # A model that can't be loaded is told now.
        self._gather(self._all(lambda worker: worker.pid.remote()), "start")

    def handle(self) -> PoolClient:
        """A client for another process, with counts of its own. Raises UserError without workers."""
        if self.board is None:
            raise UserError(
                "an engine in this process cannot be shared", given="rollout.num_workers=0", allowed=">= 1"
            )
        return PoolClient(workers=self.workers, board=self.board, limits=self.limits, version=self.version)

    def close(self) -> None:
        """End the workers."""
        if self.board is not None:
            import ray

            for actor in [*self.workers, self.board]:
                ray.kill(actor)
        self.workers = []
