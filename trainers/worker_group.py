"""N learner processes under Ray Train, and the driver that owns their run. See `trainers.placement`.

Ray Train starts the processes, joins them in a torch process group and starts them again when one dies. All
else goes through one mailbox actor: workers ask, the driver answers from its main thread, where the run
directory, the display and the signal handlers are. A message of an earlier attempt is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from envs.errors import UserError
from trainers.checkpoint import Tree
from trainers.placement import MakeLearner, WorkerContext, next_attempt
from trainers.ray_cluster import local_cluster

if TYPE_CHECKING:
    from trainers.run import Run

POLL_S = 0.5  # how often the driver looks up from its mailbox
# Ray Train would change the workers' folder and export metrics that nobody reads.
ENVIRONMENT = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}


class StaleWorkerError(RuntimeError):
    """A worker of an earlier attempt asked something: its group has been replaced."""


@ray.remote(num_cpus=0)
class Mailbox:
    """Questions of workers, answered by the driver, in order."""

    def __init__(self) -> None:
        self._questions: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0

    async def ask(self, question: Any) -> Any:
        """For workers: wait for the driver's answer."""
        self._asked += 1
        future = self._answers[self._asked] = asyncio.get_running_loop().create_future()
        await self._questions.put((self._asked, question))
        return await future

    async def take(self, seconds: float) -> tuple[int, Any] | None:
        """For the driver: the next question with its number, None after `seconds` without one."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._questions.get(), seconds)
        return None

    async def answer(self, number: int, value: Any) -> None:
        """For the driver."""
        self._answers.pop(number).set_result(value)


class RemoteRun:
    """A worker's side of the mailbox, with the methods of a run (`trainers.placement.RunClient`)."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self.attempt: int | None = None

    def report(self, step: int, metrics: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        self.ask("report", step, metrics)

    def event(self, text: str) -> None:
        """One line of events.log."""
        self.ask("event", text)

    def checkpoint(self, step: int, tree: Tree) -> None:
        """Returns when the tree is on disk."""
        self.ask("checkpoint", step, [ray.put(portable(tree))])

    def should_stop(self) -> str | None:
        """The signal that the driver has received, if any."""
        return self.ask("should_stop")

    def ask(self, kind: str, *values: Any) -> Any:
        """The driver's answer; raises what the driver raised."""
        answer = ray.get(self._mailbox.ask.remote((self.attempt, kind, values)))
        if isinstance(answer, Exception):
            raise answer
        return answer


def portable(tree: Any) -> Any:
    """The tree with NumPy arrays for tensors: those cross process borders without a copy."""
    if isinstance(tree, dict):
        return {key: portable(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [portable(value) for value in tree]
    if hasattr(tree, "detach"):
        tensor = tree.detach().cpu()
        return tensor if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
    return np.asarray(tree) if isinstance(tree, np.generic) else tree


def run_workers(make_learner: MakeLearner, cfg: Any, run: Run) -> None:
    """Train in `cfg.learner.num_workers` processes; returns when the plan is done or a signal stopped it.

    Raises UserError for what a worker raised as one, for workers that keep dying, and for silence longer
    than `cfg.learner.timeout_s`.
    """
    os.environ.update(ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-train-"))
        with run.starting():
            stack.enter_context(local_cluster(cfg.learner.num_workers))
            mailbox = Mailbox.remote()  # type: ignore[attr-defined]
        stack.callback(ray.kill, mailbox)
        work = functools.partial(_work, make_learner, mailbox, cfg.learner.backend)
        _Driver(mailbox, cfg, run).serve(work, scratch)


class _Driver:
    """Answers the workers of one run, from the thread that owns the run."""

    def __init__(self, mailbox: Any, cfg: Any, run: Run) -> None:
        self.mailbox, self.cfg, self.run = mailbox, cfg, run
        self.attempt: int | None = None
        self.failure: UserError | None = None
        self._trainer_error: BaseException | None = None
        self._resume: list[Any] | None = None

    def serve(self, work: Any, scratch: str) -> None:
        thread = threading.Thread(target=self._fit, args=(work, scratch), daemon=True)
        thread.start()
        heard = time.monotonic()
        while thread.is_alive():
            # Until the workers are there nothing can be saved: a signal ends the run at once.
            with self.run.starting() if self.attempt is None else contextlib.nullcontext():
                question = ray.get(self.mailbox.take.remote(POLL_S))
            if question is not None:
                heard = time.monotonic()
                number, (attempt, kind, values) = question
                ray.get(self.mailbox.answer.remote(number, self._answer(attempt, kind, values)))
            elif time.monotonic() - heard > self.cfg.learner.timeout_s:
                raise self._silence()
        if self.failure is not None:
            raise self.failure
        if self._trainer_error is not None:
            raise self._explained(self._trainer_error)

    def _fit(self, work: Any, scratch: str) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        workers = self.cfg.learner.num_workers
        try:
            TorchTrainer(
                work,
                scaling_config=ScalingConfig(
                    num_workers=workers, use_gpu=ray.cluster_resources().get("GPU", 0) >= workers
                ),
                run_config=RunConfig(
                    name="learner",
                    storage_path=scratch,
                    failure_config=FailureConfig(
                        max_failures=self.cfg.learner.max_restarts, controller_failure_limit=1
                    ),
                ),
            ).fit()
        except BaseException as error:  # raised again in the main thread
            self._trainer_error = error

    def _answer(self, attempt: int | None, kind: str, values: tuple[Any, ...]) -> Any:
        if kind != "start" and attempt != self.attempt:
            return StaleWorkerError(f"attempt {attempt} asked, attempt {self.attempt} is running")
        try:
            return getattr(self, f"_{kind}")(*values)
        except UserError as error:
            self.failure = error
            return error
        except ray.exceptions.RayError as error:  # the worker died before what it sent was read
            return error

    def _explained(self, error: BaseException) -> Exception:
        """Why the last group ended: a process that died is the user's to mend, an exception is a defect."""
        limit = self.cfg.learner.max_restarts
        many = f"the learner's workers failed more than learner.max_restarts={limit} times"
        failures = getattr(error, "worker_failures", {})
        # A death found by a health check is wrapped. When one dies the others raise that they lost it.
        causes = {rank: getattr(why, "health_check_failure", why) for rank, why in failures.items()}
        dead = [rank for rank, why in causes.items() if isinstance(why, ray.exceptions.RayActorError)]
        if not dead:
            return RuntimeError(f"{many}; the last time:\n{error}")
        return UserError(
            many,
            given=f"the process of rank {dead[0]} died; killed from outside, or out of memory?",
            fix="mend the cause, then resume the run",
        )

    # --- the questions

    def _start(self) -> dict[str, Any]:
        """A new group is up: which attempt it is and where it goes on, or that nothing is left to do."""
        if self.failure is not None:
            return {"done": True}
        saved = self.run.latest()
        step = saved[0] if saved else 0
        self.run.resume_at(step)
        again = self.attempt is not None
        self.attempt = max(next_attempt(saved), -1 if self.attempt is None else self.attempt + 1)
        self._resume = None if saved is None else [step, ray.put(saved[1])]
        if again:
            self.run.event(f"a learner worker died: all start again from step {step}, attempt {self.attempt}")
        return {"done": False, "attempt": self.attempt}

    def _resumed(self) -> list[Any] | None:
        return self._resume

    def _failed(self, error: UserError) -> None:
        self.failure = error

    def _report(self, step: int, metrics: dict[str, Any]) -> None:
        self.run.report(step, metrics)

    def _event(self, text: str) -> None:
        self.run.event(text)

    def _checkpoint(self, step: int, tree: list[Any]) -> None:
        self.run.checkpoint(step, ray.get(tree[0]))

    def _should_stop(self) -> str | None:
        return self.run.should_stop()

    def _silence(self) -> UserError:
        wanted, have = self.cfg.learner.num_workers, ray.cluster_resources().get("CPU", 0)
        who = (
            f"the driver waits for {wanted} learner workers to start; the cluster has {have:g} CPUs, "
            f"{ray.available_resources().get('CPU', 0):g} free"
            if self.attempt is None
            else f"the driver waits for the learner workers of attempt {self.attempt}, after step "
            f"{self.run.last_step}"
        )
        return UserError(
            f"no learner worker was heard of for learner.timeout_s={self.cfg.learner.timeout_s:g} s",
            given=who,
            fix="raise learner.timeout_s if a step takes longer, or lower learner.num_workers",
        )


def _work(make_learner: MakeLearner, mailbox: Any, backend: str) -> None:
    """In every worker: learn from where the driver says."""
    import torch.distributed as dist
    from ray.train import get_context

    if backend != "ddp":
        import deepspeed

        # Accelerate leaves this out on CPUs; a model that is loaded in parts must know of the others.
        deepspeed.init_distributed(dist_backend=dist.get_backend())
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    client = RemoteRun(mailbox)
    told = [client.ask("start") if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(told, src=0)
    start = told[0]
    assert start is not None
    if start["done"]:
        return
    client.attempt = start["attempt"]
    found = client.ask("resumed")
    with tempfile.TemporaryDirectory(prefix="learner-") as scratch:
        context = WorkerContext(
            client=client,
            scratch=scratch,
            rank=rank,
            world_size=world,
            attempt=start["attempt"],
            resumed=None if found is None else (found[0], ray.get(found[1])),
        )
        try:
            make_learner(context).learn()
        except UserError as error:
            client.ask("failed", error)
            raise
