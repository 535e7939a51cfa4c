"""What is asked of a generation engine and what comes back: requests and samples.

Token ids are the truth here; text is a view of them that others fill in. Knows no reward, no model and no
process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.errors import UserError

Version = tuple[int, int]  # (attempt, step) of the weights that wrote a sample
FINISHES = ("eos", "stop", "length")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn: softmax(logits / temperature), cut to the top k and then to the nucleus p.

    temperature 0 is greedy. top_k 0 and top_p 1 cut nothing. The model's own end tokens always stop;
    `stop_ids` are further ones.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        if self.max_new_tokens < 1:
            raise UserError("max_new_tokens must be at least 1", given=self.max_new_tokens)
        if not 0 <= self.temperature < float("inf"):
            raise UserError("temperature must be a number >= 0", given=self.temperature, fix="0 is greedy")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p must lie in (0, 1]", given=self.top_p, fix="1 cuts nothing")
        if self.top_k < 0:
            raise UserError("top_k must be at least 0", given=self.top_k, fix="0 cuts nothing")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An intervention: what a module puts out, (..., H), is changed at every position while generating.

    op "add": + vector; "set": = vector; "remove": minus the part along vector.
    """

    module: str  # a name of `model.named_modules()`
    vector: np.ndarray  # (H,) float32
    op: str = "add"

    OPS = ("add", "set", "remove")

    def key(self) -> tuple[str, str, bytes]:
        """Equal for equal edits."""
        return self.module, self.op, self.vector.tobytes()


@dataclass(kw_only=True)
class Request:
    """`n` completions of one prompt.

    The noise of completion i is a function of (seed, i) alone, so with the same weights and a deterministic
    engine a request drawn again gives the same samples. `capture` names modules whose outputs at the
    completion's tokens come back as the stream "capture/<module>", (T, H). `top_logprobs` k > 0 adds the
    streams "top_ids" and "top_logprobs", (T, k). `meta` is handed on to the samples.
    """

    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    seed: tuple[int, ...] = (0,)
    group: int = 0
    min_version: Version | None = None
    top_logprobs: int = 0
    capture: tuple[str, ...] = ()
    edit: tuple[Edit, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise UserError for a request that no engine can serve."""
        self.params.check()
        if self.n < 1:
            raise UserError("a request asks for at least one completion", given=self.n)
        if not self.prompt_ids:
            raise UserError("a prompt needs at least one token", given=self.meta or self.group)
        for edit in self.edit:
            if edit.op not in Edit.OPS:
                raise UserError("unknown edit", given=edit.op, allowed=Edit.OPS)

    def generator(self, index: int) -> np.random.Generator:
        """The source of noise of completion `index`."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((*self.seed, index))))

    def nbytes(self) -> int:
        """About what it holds in memory while it waits."""
        return 8 * len(self.prompt_ids) + sum(edit.vector.nbytes for edit in self.edit) + 256


@dataclass(kw_only=True)
class Sample:
    """One completion, or one seat of one episode. T is the number of completion tokens.

    `completion_ids` holds the end token when `finish` is "eos" or "stop". `logp_rollout` (T,) float32 are
    the log-probabilities of what was drawn, under the distribution that was drawn from (temperature and
    cuts included; 0 when greedy). `mask` (T,) is 1 where a learner may learn; None: everywhere. `streams`
    are per token, (T, ...), by name. `rewards` are by name, as `rewards.reward` has them.
    """

    id: str
    group: int
    index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    finish: str
    logp_rollout: np.ndarray
    version: Version = (0, 0)
    episode: int = 0
    seat: int = 0
    mask: np.ndarray | None = None
    streams: dict[str, np.ndarray] = field(default_factory=dict)
    rewards: dict[str, Any] = field(default_factory=dict)
    cost: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    completion: str = ""


def sample_id(request: Request, index: int) -> str:
    """The name of a sample: its request's seed and its number in the group."""
    return "-".join(map(str, (*request.seed, index)))
