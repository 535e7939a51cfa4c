"""The Feed: prompt order, groups, sampling, rewards, credit, the buffer, staleness and the cursor.

Batch n of the learner is asked for by number. It is drawn with the weights that were published after batch
n - 1 - staleness, so what a batch holds never depends on timing. One background thread takes publications
and drawings in the order they were asked for. An object of one process, or a Ray actor (`remote_feed`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rewards.reward import Failure, Value

from envs.errors import UserError
from rollouts.samples import Request, Sample, SamplingParams
from rollouts.weights import PackedWeights
from trainers.credit import group_advantages
from trainers.feed_batch import (
    Batch,
    batch_metrics,
    batch_state,
    check_scores,
    decode,
    encode,
    learnable,
    load_batch,
    sample_record,
    share,
)

LEAST_SAMPLES = 32  # before the failure rate is believed


@dataclass(kw_only=True)
class FeedConfig:
    """What the Feed needs to know of a run. Batches: `prompts` x `samples` completions each."""

    seed: int
    batches: int  # in the whole run; none is drawn beyond
    prompts: int
    samples: int
    params: SamplingParams
    staleness: int = 0
    max_failure_rate: float = 0.1
    scale_rewards: str = "group"
    equal_rewards_warning: int = 10  # batches in a row without any difference within a group
    samples_path: str | None = None  # where some samples of every batch are written, for readers
    samples_logged: int = 4


@dataclass(kw_only=True)
class RewardContext:
    """What a reward may use beside the samples: numbers of the batch, and a generator of its own."""

    batch: int
    rng: np.random.Generator
    tokenizer: Any = None
    pool: Any = None


class Feed:
    """See the module.

    task: a TextTask; tokenizer: of the model; pool: anything with `sample` and `publish`; rewards: named
    Rewarders with weights; algorithm: has the seams `credit` and `observe` (None when left alone).
    """

    def __init__(
        self, cfg: FeedConfig, task: Any, tokenizer: Any, pool: Any, rewards: Any, algorithm: Any
    ) -> None:
        self.cfg, self.task, self.tokenizer, self.pool = cfg, task, tokenizer, pool
        self.rewards, self.algorithm = rewards, algorithm
        self._buffer: dict[int, Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._next = 0  # the first batch that was not asked for yet
        self._failed = self._counted = self._equal = 0
        self._error: BaseException | None = None

    # --- weights in, samples out

    def publish(self, packed: PackedWeights, batch: int) -> None:
        """Weights that batch `batch` is to be learned with; draws batch `batch + staleness` after them."""
        last = min(batch + self.cfg.staleness, self.cfg.batches - 1)
        self._then(lambda: self.pool.publish(packed))
        for number in range(self._next, last + 1):
            self._buffer[number] = self._then(lambda number=number: self._draw(number))
            self._next = number + 1

    def _then(self, work: Callable[[], Any]) -> Future[Any]:
        """Do it after everything that was asked for before, unless something of that failed."""

        def checked() -> Any:
            if self._error is not None:
                raise self._error
            try:
                return work()
            except BaseException as error:
                self._error = error
                raise

        return self._thread.submit(checked)

    def _draw(self, number: int) -> Batch:
        requests, cfg = [], self.cfg
        prompts = [self.task.train(index) for index in self._order(number)]
        for j, prompt in enumerate(prompts):
            requests.append(
                Request(
                    prompt_ids=encode(self.tokenizer, prompt),
                    n=cfg.samples,
                    params=cfg.params,
                    seed=(cfg.seed, number, j),
                    group=number * cfg.prompts + j,
                    meta={**prompt.meta, "prompt_id": prompt.id},
                )
            )
        samples = self.pool.sample(requests)
        for sample in samples:
            prompt = prompts[sample.group - number * cfg.prompts]
            sample.prompt = prompt.text if prompt.text is not None else json.dumps(prompt.messages)
            sample.completion = decode(self.tokenizer, sample)
        groups = [samples[i : i + cfg.samples] for i in range(0, len(samples), cfg.samples)]
        batch = Batch(number=number, groups=groups)
        if self.algorithm.observe is None:
            self._score(batch)
        return batch

    def _order(self, number: int) -> list[int]:
        """Task indices of a batch: one shuffled pass over the training split after another."""
        size, first = self.task.train_size, number * self.cfg.prompts
        if size is None:
            return list(range(first, first + self.cfg.prompts))
        found = []
        for at in range(first, first + self.cfg.prompts):
            epoch = np.random.default_rng((self.cfg.seed, at // size)).permutation(size)
            found.append(int(epoch[at % size]))
        return found

    # --- rewards and credit

    def _score(self, batch: Batch) -> None:
        context = RewardContext(
            batch=batch.number,
            rng=np.random.default_rng((self.cfg.seed, batch.number, 1)),
            tokenizer=self.tokenizer,
            pool=self.pool,
        )
        shape = (len(batch.groups), self.cfg.samples)
        total, valid = np.zeros(shape), np.zeros(shape, bool)
        failures: dict[str, int] = {}
        for name, weight, rewarder in self.rewards:
            scores = rewarder.score(batch.groups, context)
            check_scores(name, scores, batch.groups)
            for i, group in enumerate(batch.groups):
                for j, (sample, reward) in enumerate(zip(group, scores[i])):
                    sample.rewards[name] = reward
                    if isinstance(reward, Value):
                        total[i, j] += weight * reward.x
                        valid[i, j] = True
                    elif isinstance(reward, Failure):
                        failures[reward.name] = failures.get(reward.name, 0) + 1
        for i, group in enumerate(batch.groups):
            for j, sample in enumerate(group):
                valid[i, j] &= not any(isinstance(r, Failure) for r in sample.rewards.values())
                if not valid[i, j]:
                    sample.mask = np.zeros(len(sample.completion_ids), np.float32)
        self._count(valid, failures)
        advantages = group_advantages(total, valid, self.cfg.scale_rewards)
        batch.credit = self._credit(batch, advantages)
        batch.metrics = batch_metrics(batch, total, valid)
        self._warn_if_equal(batch)
        self._log(batch, total)

    def _credit(self, batch: Batch, advantages: np.ndarray) -> list[np.ndarray]:
        if self.algorithm.credit is not None:
            credit = self.algorithm.credit(batch.groups, advantages)
        else:
            credit = [
                np.full(len(sample.completion_ids), advantages[i, j], np.float32)
                for i, group in enumerate(batch.groups)
                for j, sample in enumerate(group)
            ]
        for sample, values in zip(batch.samples, credit, strict=True):
            if values.shape != (len(sample.completion_ids),) or not np.isfinite(values).all():
                raise UserError(
                    f"the credit of sample {sample.id} must be one finite number a token",
                    given=f"shape {values.shape}, {np.isnan(values).sum()} of them NaN",
                    allowed=f"shape ({len(sample.completion_ids)},)",
                )
        return [np.asarray(values, np.float32) for values in credit]

    def _count(self, valid: np.ndarray, failures: dict[str, int]) -> None:
        self._counted += valid.size
        self._failed += int((~valid).sum())
        rate = self._failed / self._counted
        if self._counted >= LEAST_SAMPLES and rate > self.cfg.max_failure_rate:
            raise UserError(
                f"the rewards of {self._failed} of {self._counted} samples failed",
                given=f"a rate of {rate:.0%}; in this batch {failures or 'no reward was applicable'}",
                allowed=f"reward.max_failure_rate={self.cfg.max_failure_rate:g}",
                fix="look at the samples of samples.jsonl and at the reward's own messages",
            )

    def _warn_if_equal(self, batch: Batch) -> None:
        self._equal = self._equal + 1 if batch.metrics["frac_reward_zero_std"] == 1.0 else 0
        if self._equal and self._equal % self.cfg.equal_rewards_warning == 0:
            batch.notices.append(
                f"all rewards within every group were equal in the last {self._equal} batches, so nothing is "
                "learned. Look at samples.jsonl: is the task too hard or solved, is the format never met, "
                "are completions cut off (rollout.max_new_tokens), is the temperature too low?"
            )

    def _log(self, batch: Batch, total: np.ndarray) -> None:
        if self.cfg.samples_path is None or not self.cfg.samples_logged:
            return
        lines = []
        rewards = total.reshape(-1)
        for at in np.linspace(0, len(rewards) - 1, min(self.cfg.samples_logged, len(rewards))).astype(int):
            lines.append(json.dumps(sample_record(batch.number, batch.samples[at], float(rewards[at]))))
        with Path(self.cfg.samples_path).open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    # --- what a learner asks

    def samples(self, number: int, rank: int = 0, world: int = 1) -> list[Sample]:
        """This rank's samples of a batch, for the `observe` seam."""
        return share(self._batch(number).samples, rank, world)

    def observed(self, number: int, rank: int, world: int, streams: dict[str, list[np.ndarray]]) -> None:
        """What `observe` saw: per stream, arrays (T, ...) of this rank's samples. The last rank scores."""
        batch = self._batch(number)
        mine = share(batch.samples, rank, world)
        for name, values in streams.items():
            for sample, value in zip(mine, values, strict=True):
                sample.streams[name] = value
        batch.observers.add(rank)
        if len(batch.observers) == world:
            self._score(batch)

    def rows(self, number: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
        """This rank's rows of a batch.

        {"samples": list[Sample], "credit": list of (T,) float32, "items": learnable tokens over all ranks,
        "metrics", "notices": of the whole batch, on every rank}
        """
        batch = self._batch(number)
        if batch.credit is None:
            raise RuntimeError(f"batch {number} has no credit yet: not every rank has observed it")
        return {
            "samples": share(batch.samples, rank, world),
            "credit": share(batch.credit, rank, world),
            "items": sum(learnable(sample) for sample in batch.samples),
            "metrics": batch.metrics,
            "notices": batch.notices,
        }

    def _batch(self, number: int) -> Batch:
        if number not in self._buffer:
            raise RuntimeError(f"batch {number} was not asked for: no weights were published for it")
        for old in [n for n in self._buffer if n < number]:
            del self._buffer[old]
        return self._buffer[number].result()

    # --- restarts

    def state_dict(self) -> dict[str, Any]:
        """Everything the next batches depend on; waits for what is being drawn."""
        batches = [future.result() for _, future in sorted(self._buffer.items())]
        return {
            "next": self._next,
            "counts": [self._failed, self._counted, self._equal],
            "batches": [batch_state(batch) for batch in batches],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of `state_dict`, before anything was published."""
        self._next = state["next"]
        self._failed, self._counted, self._equal = state["counts"]
        self._buffer = {}
        for saved in state["batches"]:
            batch = load_batch(saved)
            self._buffer[batch.number] = Future()
            self._buffer[batch.number].set_result(batch)

    def close(self) -> None:
        """End the thread; what is being drawn is finished first."""
        self._thread.shutdown(cancel_futures=True)


class RemoteFeed:
    """A Feed in a Ray actor, with the same methods, for learners in other processes.

    Every question has a deadline; a Feed that died or does not answer raises UserError.
    """

    def __init__(self, actor: Any, deadline_s: float) -> None:
        self._actor, self._deadline_s = actor, deadline_s

    def publish(self, packed: PackedWeights, batch: int) -> None:
        """See `Feed.publish`."""
        self._ask("publish", packed, batch)

    def samples(self, number: int, rank: int = 0, world: int = 1) -> list[Sample]:
        """See `Feed.samples`."""
        return self._ask("samples", number, rank, world)

    def observed(self, number: int, rank: int, world: int, streams: dict[str, list[np.ndarray]]) -> None:
        """See `Feed.observed`."""
        self._ask("observed", number, rank, world, streams)

    def rows(self, number: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
        """See `Feed.rows`."""
        return self._ask("rows", number, rank, world)

    def state_dict(self) -> dict[str, Any]:
        """See `Feed.state_dict`."""
        return self._ask("state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Feed.load_state_dict`."""
        self._ask("load_state_dict", state)

    def close(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._actor)

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=self._deadline_s)
        except ray.exceptions.GetTimeoutError as error:
            raise UserError(
                f"the Feed did not answer '{method}' within {self._deadline_s:.0f} s",
                fix="raise rollout.deadline_s if drawing a batch takes longer; the run can be resumed",
            ) from error
        except ray.exceptions.RayActorError as error:
            raise UserError(
                "the Feed died", given=str(error).splitlines()[0], fix="resume the run: nothing is lost"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, UserError) else error) from None


def remote_feed(
    cfg: FeedConfig, task: Any, tokenizer: Any, pool: Any, rewards: Any, algorithm: Any, deadline_s: float
) -> RemoteFeed:
    """A Feed in an actor of its own."""
    import ray

    make = ray.remote(Feed).options(num_cpus=0, max_concurrency=16)
    return RemoteFeed(make.remote(cfg, task, tokenizer, pool, rewards, algorithm), 2 * deadline_s)
