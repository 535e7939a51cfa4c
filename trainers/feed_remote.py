"""A Feed in a Ray actor, for learners in other processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.errors import UserError
from rollouts.samples import Sample
from rollouts.store import StoredWeights
from rollouts.weights import PackedWeights
from trainers.feed import Feed, FeedConfig


class RemoteFeed:
    """The methods of a Feed that lives in an actor.

    Every question has a deadline. A Feed that died or does not answer raises UserError.
    """

    def __init__(self, actor: Any, deadline_s: float) -> None:
        self._actor, self._deadline_s = actor, deadline_s

    def start(self, attempt: int, state: dict[str, Any] | None = None) -> None:
        """See `Feed.start`."""
        self._ask("start", attempt, state)

    def publish(self, weights: PackedWeights | StoredWeights, batch: int) -> None:
        """See `Feed.publish`."""
        self._ask("publish", weights, batch)

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
    """A Feed in an actor of its own. `deadline_s`: for an answer, which may wait for a whole batch."""
    import ray

    make = ray.remote(Feed).options(num_cpus=0, max_concurrency=16)
    return RemoteFeed(make.remote(cfg, task, tokenizer, pool, rewards, algorithm), deadline_s)
