"""The Feed: prompt order, groups, sampling, rewards, credit, the buffer, staleness and the cursor.

Batch n of the learner is asked for by number. It is drawn with the weights that were published after batch
n - 1 - staleness, so what a batch holds never depends on timing. One background thread takes publications
and drawings in the order they were asked for. An object of one process, or a Ray actor
(`trainers.feed_remote`).

A learner's group begins with `start`; then, for n = 0, 1, ...: `publish(weights, n)`, and on every rank
`samples(n)` and `observed(n)` if the algorithm observes, and `rows(n)` as often as it likes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from rewards.reward import Failure, Value
from rollouts.pool import RolloutError
from rollouts.samples import Request, Sample, SamplingParams, Version
from rollouts.store import StoredWeights
from rollouts.weights import PackedWeights, WeightsError
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
from trainers.files import replace_file
from trainers.samples_log import shown, spread

LEAST_SAMPLES = 32  # before the failure rate is believed
SHOWN = 3  # samples of the first batch, as an event of the run: the best, the middle, the worst


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
    mask_cut: bool = False  # completions that met max_new_tokens are judged, but not learned from
    steps_per_batch: int = 1  # optimizer steps that a batch is used for
    equal_rewards_warning: int = 10  # batches in a row without any difference within a group
    samples_path: str | None = None  # where some samples of every batch are written, for readers
    samples_logged: int = 4


@dataclass(kw_only=True)
class RewardContext:
    """What a reward may use beside the samples: numbers of the batch, and a generator of its own."""

    batch: int
    version: Version
    rng: np.random.Generator
    tokenizer: Any = None
    pool: Any = None


class Feed:
    """See the module.

    task: a TextTask; tokenizer: of the model; pool: anything with `sample` and `publish`; rewards: named
    Rewarders with weights; algorithm: a LanguageAlgorithm, whose seam `credit` works here.
    """

    def __init__(
        self, cfg: FeedConfig, task: Any, tokenizer: Any, pool: Any, rewards: Any, algorithm: Any
    ) -> None:
        self.cfg, self.task, self.tokenizer, self.pool = cfg, task, tokenizer, pool
        self.rewards, self.algorithm = rewards, algorithm
        self._buffer: dict[int, Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._attempt = -1
        self._version: Version | None = None  # what the pool draws with
        self._next = 0  # the first batch that was not asked for yet
        self._failed = self._counted = self._equal = 0
        self._error: BaseException | None = None

    # --- weights in, samples out

    def start(self, attempt: int, state: dict[str, Any] | None = None) -> None:
        """A group of learners begins, from `state` (of `state_dict`) or from the first batch.

        What an earlier attempt has asked for is given up; what is being drawn for it is waited for.
        """
        if attempt <= self._attempt:
            raise RuntimeError(f"attempt {attempt} starts after attempt {self._attempt}")
        self._attempt = attempt
        for asked in self._buffer.values():
            asked.cancel()
        self._thread.submit(lambda: None).result()
        self._error, self._next, self._buffer = None, 0, {}
        self._failed = self._counted = self._equal = 0
        if state is not None:
            self._load(state)
        self._forget_lines()

    def publish(self, weights: PackedWeights | StoredWeights, batch: int) -> None:
        """Weights that batch `batch` is to be learned with; draws batch `batch + staleness` after them.

        Weights of an earlier attempt than the newest are dropped. Batches before `batch` are over.
        """
        if weights.version[0] < self._attempt:
            return
        for old in [number for number in self._buffer if number < batch]:
            del self._buffer[old]
        last = min(batch + self.cfg.staleness, self.cfg.batches - 1)
        self._then(lambda: self._send(weights))
        for number in range(self._next, last + 1):
            self._buffer[number] = self._then(functools.partial(self._draw, number))
            self._next = number + 1

    def _send(self, weights: PackedWeights | StoredWeights) -> None:
        self.pool.publish(weights)
        self._version = weights.version

    def _then(self, work: Callable[[], Any]) -> Future[Any]:
        """Do it after everything that was asked for before, unless something of that failed."""

        def checked() -> Any:
            if self._error is not None:
                raise self._error
            try:
                return work()
            except (RolloutError, WeightsError) as error:
                self._error = UserError(str(error), fix="mend the cause, then resume the run")
                raise self._error from error
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
                    min_version=self._version,
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
            version=batch.groups[0][0].version,
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
                if not valid[i, j] or (self.cfg.mask_cut and sample.finish == "length"):
                    sample.mask = np.zeros(len(sample.completion_ids), np.float32)
        self._count(valid, failures)
        advantages = group_advantages(total, valid, self.cfg.scale_rewards)
        batch.credit = self._credit(batch, advantages)
        batch.metrics = batch_metrics(batch, total, valid)
        if batch.number == 0:
            first = [
                sample_record(0, batch.samples[i], float(total.flat[i]))
                for i in spread(list(total.flat), SHOWN)
            ]
            batch.notices.append(f"from the first batch, before any step:\n{shown(first)}")
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
            step = batch.number * self.cfg.steps_per_batch
            lines.append(json.dumps(sample_record(step, batch.samples[at], float(rewards[at]))))
        with Path(self.cfg.samples_path).open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def _forget_lines(self) -> None:
        """Take the samples of batches that will be drawn again out of the file."""
        path = None if self.cfg.samples_path is None else Path(self.cfg.samples_path)
        if path is None or not path.exists():
            return
        end = self._next * self.cfg.steps_per_batch
        with path.open(encoding="utf-8") as file:
            kept = [line for line in file if line.endswith("\n") and json.loads(line)["step"] < end]
        replace_file(path, "".join(kept))

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
        return self._buffer[number].result()

    # --- restarts

    def state_dict(self) -> dict[str, Any]:
        """Everything the next batches depend on; waits for what is being drawn."""
        batches = [future.result() for _, future in sorted(self._buffer.items())]
        return {
            "next": self._next,
            "counts": [self._failed, self._counted, self._equal],
            "batches": [batch_state(batch) for batch in batches],
            "algorithm": self.algorithm.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._failed, self._counted, self._equal = state["counts"]
        for saved in state["batches"]:
            batch = load_batch(saved)
            self._buffer[batch.number] = Future()
            self._buffer[batch.number].set_result(batch)
        self.algorithm.load_state_dict(state["algorithm"])

    def close(self) -> None:
        """End the thread; what is being drawn is finished first."""
        self._thread.shutdown(cancel_futures=True)
