"""The rollout pool: generation engines in this process or in Ray actors, shared by everybody who samples.

    pool = RolloutPool(EngineSpec(model_path=...), num_workers=2)
    samples = pool.sample([Request(...), ...])
    pool.publish(pack(named_tensors, version))

A worker that dies is started again by Ray with the newest weights, and what it was asked is asked again.
Every wait has a deadline. Knows no reward and no learner.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envs.errors import UserError
from rollouts.engine import EngineSpec, make_engine
from rollouts.samples import Request, Sample, Version
from rollouts.weights import PackedWeights, Transfer, WeightsError, accept

if TYPE_CHECKING:
    from concurrent.futures import Future


class RolloutError(RuntimeError):
    """Samples or weights that did not come: who was waited for, for what, and how long."""


class QueueFullError(RolloutError):
    """More is waiting than the pool's bounds allow."""


@dataclass
class _Waiting:
    """Requests of one caller that wait for the worker's engine."""

    requests: list[Request]
    answer: Future[list[list[Sample]]]


class Worker:
    """One engine and the queue before it; a Ray actor, or a plain object in the caller's process.

    With an engine that batches callers, whatever waits when it becomes free is answered together.
    """

    def __init__(self, spec: EngineSpec, name: str, deadline_s: float, board: Any = None) -> None:
        self.name, self.deadline_s, self.board = name, deadline_s, board
        self.engine = make_engine(spec)
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        if board is not None:
            self.renew()

    def renew(self) -> Version:
        """Take the newest weights from the board, as after a restart.

        If they died with the learner that sent them nothing changes; its next start sends them anew.
        """
        import ray

        found = ray.get(self.board.newest.remote(), timeout=self.deadline_s)
        if found is not None and found[0] != self.engine.version:
            with contextlib.suppress(ray.exceptions.ObjectLostError):
                self.load(ray.get(found[1][0], timeout=self.deadline_s))
        return self.engine.version

    def load(self, packed: PackedWeights) -> Version:
        """Verify and take over. Raises WeightsError; then the weights are what they were."""
        transfer = Transfer(packed.version, self.name, self.deadline_s)
        with self._lock:
            accept(packed, self.engine, transfer)
        return self.engine.version

    def generate(self, requests: list[Request]) -> list[list[Sample]]:
        """The samples of every request. Older weights than a request's `min_version` are renewed first."""
        wanted = max((r.min_version for r in requests if r.min_version is not None), default=None)
        if wanted is not None and self.engine.version < wanted:
            if self.board is not None:
                self.renew()
            if self.engine.version < wanted:
                raise WeightsError(f"{self.name} has weights {self.engine.version}, {wanted} were asked for")
        if not self.engine.batches_callers:
            with self._lock:
                return self.engine.generate(requests)
        return self._together(requests)

    def _together(self, requests: list[Request]) -> list[list[Sample]]:
        from concurrent.futures import Future

        mine = _Waiting(requests, Future())
        self._waiting.append(mine)
        with self._lock:
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


def _cause(error: Any) -> BaseException:
    """What a worker raised, if it is one of the errors that this module speaks of."""
    known = isinstance(error.cause, UserError | RolloutError | WeightsError)
    return error.cause if known else error


class Board:
    """A small Ray actor that knows the newest weights: what a worker that comes back asks."""

    def __init__(self) -> None:
        self._newest: tuple[Version, list[Any]] | None = None

    def put(self, version: Version, ref: list[Any]) -> None:
        """Keep a published object (its reference in a list, so that it is not fetched)."""
        self._newest = (version, ref)

    def newest(self) -> tuple[Version, list[Any]] | None:
        """The newest version and its object, or None."""
        return self._newest


@dataclass(kw_only=True)
class PoolMetrics:
    """Counted since the pool began, in this client."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    redrawn_requests: int = 0
    sample_seconds: float = 0.0
    publish_seconds: float = 0.0
    published_bytes: int = 0


@dataclass(kw_only=True)
class PoolClient:
    """What samples and publishes. Picklable when the workers are remote; give each process its own.

    board: Ray actor or None; workers: Ray actors, or one `Worker` in this process. Bounds are on what one
    client has waiting.
    """

    workers: list[Any]
    board: Any = None
    deadline_s: float = 600.0
    max_queue_requests: int = 4096
    max_queue_bytes: int = 64 << 20
    version: Version = (0, 0)
    metrics: PoolMetrics = field(default_factory=PoolMetrics)

    def sample(self, requests: list[Request]) -> list[Sample]:
        """`n` samples of every request, requests in their order.

        Raises QueueFullError over the bounds, RolloutError when a deadline passes or a worker keeps dying,
        UserError for a request no engine can serve.
        """
        self._check(requests)
        started = time.monotonic()
        answers = self._here(requests) if self.board is None else self._remote(requests)
        samples = [sample for answer in answers for sample in answer]
        self.metrics.requests += len(requests)
        self.metrics.samples += len(samples)
        self.metrics.tokens += sum(len(s.completion_ids) for s in samples)
        self.metrics.sample_seconds += time.monotonic() - started
        return samples

    def publish(self, packed: PackedWeights) -> None:
        """Send new weights to every worker and wait until all have them.

        Raises WeightsError when a version is not newer than the one before or arrives broken, RolloutError
        when a worker does not answer in time.
        """
        if packed.version <= self.version and self.version != (0, 0):
            raise WeightsError(f"weights {packed.version} are not newer than {self.version}")
        started = time.monotonic()
        if self.board is None:
            self.workers[0].load(packed)
        else:
            self._publish_remote(packed)
        self.version = packed.version
        self.metrics.publish_seconds += time.monotonic() - started
        self.metrics.published_bytes += packed.buffer.nbytes

    def _check(self, requests: list[Request]) -> None:
        for request in requests:
            request.check()
        size = sum(request.nbytes() for request in requests)
        if len(requests) > self.max_queue_requests or size > self.max_queue_bytes:
            raise QueueFullError(
                f"{len(requests)} requests of {size:,} bytes at once; the pool takes "
                f"{self.max_queue_requests} of {self.max_queue_bytes:,} bytes"
            )

    def _here(self, requests: list[Request]) -> list[list[Sample]]:
        return self.workers[0].generate(requests)

    def _publish_remote(self, packed: PackedWeights) -> None:
        import ray

        ref = ray.put(packed)
        ray.get(self.board.put.remote(packed.version, [ref]), timeout=self.deadline_s)
        for index, worker in enumerate(self.workers):
            self._until_answered(index, lambda worker=worker: worker.load.remote(ref))

    def _remote(self, requests: list[Request]) -> list[list[Sample]]:
        """Requests go out in as many parts as there are workers; a part whose worker died goes out again."""
        parts = [list(range(i, len(requests), len(self.workers))) for i in range(len(self.workers))]
        answers: list[list[Sample]] = [[] for _ in requests]
        flying = {}
        for index, part in enumerate(parts):
            if part:
                flying[self._ask(index, [requests[i] for i in part])] = (index, part, 0)
        import ray

        limit = time.monotonic() + self.deadline_s
        while flying:
            ready, _ = ray.wait(list(flying), num_returns=1, timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                names = sorted({f"worker {index}" for index, _, _ in flying.values()})
                count = sum(len(part) for _, part, _ in flying.values())
                raise RolloutError(
                    f"{', '.join(names)} did not answer {count} requests within {self.deadline_s:.0f} s "
                    "(rollout.deadline_s)"
                )
            index, part, tries = flying.pop(ready[0])
            try:
                for i, answer in zip(part, ray.get(ready[0])):
                    answers[i] = answer
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except ray.exceptions.RayActorError as error:
                if not _comes_back(error, tries):
                    raise RolloutError(f"rollout worker {index} died {tries + 1} times: {error}") from error
                self.metrics.redrawn_requests += len(part)
                flying[self._ask(index, [requests[i] for i in part])] = (index, part, tries + 1)
        return answers

    def _ask(self, index: int, requests: list[Request]) -> Any:
        return self.workers[index].generate.remote(requests)

    def _until_answered(self, index: int, call: Any) -> Any:
        """The answer of a call that may be repeated when the worker dies in it."""
        import ray

        limit, tries = time.monotonic() + self.deadline_s, 0
        while True:
            try:
                return ray.get(call(), timeout=max(0.1, limit - time.monotonic()))
            except ray.exceptions.GetTimeoutError as error:
                raise RolloutError(
                    f"rollout worker {index} did not answer within {self.deadline_s:.0f} s "
                    "(rollout.deadline_s)"
                ) from error
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except ray.exceptions.RayActorError as error:
                if not _comes_back(error, tries):
                    raise RolloutError(f"rollout worker {index} died {tries + 1} times: {error}") from error
                tries += 1


def _comes_back(error: Exception, tries: int) -> bool:
    """Whether a worker that died in a call will answer another one."""
    import ray

    time.sleep(0.2)
    return isinstance(error, ray.exceptions.ActorUnavailableError) and tries < 100


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
        limits: dict[str, Any] = {
            "deadline_s": deadline_s,
            "max_queue_requests": max_queue_requests,
            "max_queue_bytes": max_queue_bytes,
        }
        if num_workers == 0:
            super().__init__(workers=[Worker(spec, "this process", deadline_s)], **limits)
            return
        import ray

        board = ray.remote(Board).options(num_cpus=0).remote()
        make = ray.remote(Worker).options(
            num_cpus=cpus_per_worker,
            num_gpus=gpus_per_worker,
            max_restarts=max_restarts,
            max_task_retries=0,  # the client asks again, so that it can count
            max_concurrency=1 if spec.deterministic else 64,
        )
        workers = [make.remote(spec, f"rollout worker {i}", deadline_s, board) for i in range(num_workers)]
        super().__init__(workers=workers, board=board, **limits)
        for index, worker in enumerate(workers):  # a model that can't be loaded is told now
            self._until_answered(index, lambda worker=worker: worker.pid.remote())

    def handle(self) -> PoolClient:
        """A client for another process, with counts of its own. Raises UserError without workers."""
        if self.board is None:
            raise UserError(
                "an engine in this process cannot be shared", given="rollout.num_workers=0", allowed=">= 1"
            )
        return PoolClient(
            workers=self.workers,
            board=self.board,
            deadline_s=self.deadline_s,
            max_queue_requests=self.max_queue_requests,
            max_queue_bytes=self.max_queue_bytes,
            version=self.version,
        )

    def close(self) -> None:
        """End the workers."""
        if self.board is not None:
            import ray

            for actor in [*self.workers, self.board]:
                ray.kill(actor)
        self.workers = []
