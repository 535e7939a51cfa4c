"""One batch of the Feed: its samples, credit and numbers; in a checkpoint; and as a reader sees them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.errors import UserError
from rewards.reward import Failure, Value
from rollouts.samples import Sample

Group = list[Sample]


@dataclass(kw_only=True)
class Batch:
    """One batch, from drawing to the rows that are learned from.

    credit: (T,) float32 per sample, None before the rewards are there; observers: ranks whose `observe`
    has been seen; metrics and notices: for the run.
    """

    number: int
    groups: list[Group]
    credit: list[np.ndarray] | None = None
    observers: set[int] = field(default_factory=set)
    metrics: dict[str, float | None] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """All samples, group after group."""
        return [sample for group in self.groups for sample in group]


def learnable(sample: Sample) -> int:
    """How many of a sample's tokens are learned from."""
    return len(sample.completion_ids) if sample.mask is None else int(sample.mask.sum())


def share(rows: list[Any], rank: int, world: int) -> list[Any]:
    """The rows of one rank of a batch: a contiguous part."""
    size = len(rows) // world
    return rows[rank * size : (rank + 1) * size]


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt: plain text, or messages through the chat template. Raises UserError."""
    if prompt.messages is not None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the prompts are messages, but the tokenizer has no chat template",
                given=prompt.id,
                fix="choose a chat model, or a task whose prompts are plain text",
            )
        ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(prompt.text)["input_ids"]
    if not ids:
        raise UserError("a prompt has no tokens", given=prompt.id)
    return list(ids)


def decode(tokenizer: Any, sample: Sample) -> str:
    """A completion as text, up to its first end token, without special tokens."""
    ids, end = sample.completion_ids, tokenizer.eos_token_id
    if end in ids:  # what was not written left to right may have tokens after it
        ids = ids[: ids.index(end)]
    return tokenizer.decode(ids, skip_special_tokens=True)


def check_scores(name: str, scores: Any, groups: list[Group]) -> None:
    """Raise UserError when a reward did not answer with one result a sample."""
    got = [len(row) for row in scores] if isinstance(scores, list) else scores
    wanted = [len(group) for group in groups]
    if got != wanted:
        raise UserError(
            f"the reward '{name}' must give one result per sample of every group",
            given=f"{got}",
            allowed=f"{wanted}",
        )


def batch_metrics(batch: Batch, total: np.ndarray, valid: np.ndarray) -> dict[str, float | None]:
    """Numbers of a batch; `total` and `valid` are (P, G)."""
    samples = batch.samples
    lengths = np.array([len(s.completion_ids) for s in samples])
    flat = np.concatenate([s.logp_rollout for s in samples])
    spread = [np.ptp(total[i][valid[i]]) if valid[i].sum() > 1 else 0.0 for i in range(len(total))]
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, reward in sample.rewards.items():
            if isinstance(reward, Value):
                parts.setdefault(f"reward/{name}", []).append(reward.x)
                for part, x in reward.parts.items():
                    parts.setdefault(f"reward/{name}/{part}", []).append(x)
    return {
        "reward": float(total[valid].mean()) if valid.any() else None,
        "reward_std": float(total[valid].std()) if valid.any() else None,
        "frac_reward_zero_std": float(np.mean([s == 0.0 for s in spread])),
        "reward_failures": float((~valid).mean()),
        "completion_length": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "completions_cut": float(np.mean([s.finish == "length" for s in samples])),
        "logp_rollout": float(flat.mean()),
        **{name: float(np.mean(values)) for name, values in sorted(parts.items())},
    }


def sample_record(step: int, sample: Sample, total: float) -> dict[str, Any]:
    """A sample as a line of samples.jsonl."""
    return {
        "step": step,
        "id": sample.id,
        "version": list(sample.version),
        "prompt": sample.prompt,
        "completion": sample.completion,
        "finish": sample.finish,
        "tokens": len(sample.completion_ids),
        "reward": total,
        "rewards": {name: reward_record(reward) for name, reward in sample.rewards.items()},
    }


def reward_record(reward: Any) -> Any:
    """A number, a number with its parts, the failure's name, or null where the reward does not apply."""
    if isinstance(reward, Value):
        return {"value": reward.x, **reward.parts} if reward.parts else reward.x
    return {"failure": reward.name} if isinstance(reward, Failure) else None


# --- in a checkpoint


def batch_state(batch: Batch) -> dict[str, Any]:
    """A batch as a checkpoint tree. Rewards are left out: they have become credit."""
    return {
        "number": batch.number,
        "sizes": [len(group) for group in batch.groups],
        "samples": {str(i): _sample_state(sample) for i, sample in enumerate(batch.samples)},
        "credit": None if batch.credit is None else {str(i): c for i, c in enumerate(batch.credit)},
        "metrics": dict(batch.metrics),
        "notices": list(batch.notices),
    }


def load_batch(state: dict[str, Any]) -> Batch:
    """Undo of `batch_state`."""
    samples = [_load_sample(state["samples"][str(i)]) for i in range(len(state["samples"]))]
    groups, at = [], 0
    for size in state["sizes"]:
        groups.append(samples[at : at + size])
        at += size
    credit = state["credit"]
    return Batch(
        number=state["number"],
        groups=groups,
        credit=None if credit is None else [np.asarray(credit[str(i)]) for i in range(len(credit))],
        metrics=state["metrics"],
        notices=state["notices"],
    )


def _sample_state(sample: Sample) -> dict[str, Any]:
    return {
        "text": json.dumps(
            {
                "id": sample.id,
                "group": sample.group,
                "index": sample.index,
                "episode": sample.episode,
                "seat": sample.seat,
                "finish": sample.finish,
                "version": sample.version,
                "cost": sample.cost,
                "meta": sample.meta,
                "prompt": sample.prompt,
                "completion": sample.completion,
            }
        ),
        "prompt_ids": np.array(sample.prompt_ids, np.int64),
        "completion_ids": np.array(sample.completion_ids, np.int64),
        "logp_rollout": sample.logp_rollout,
        "mask": sample.mask,
        "streams": dict(sample.streams),
    }


def _load_sample(state: dict[str, Any]) -> Sample:
    text = json.loads(state["text"])
    return Sample(
        **{**text, "version": tuple(text["version"])},
        prompt_ids=[int(i) for i in state["prompt_ids"]],
        completion_ids=[int(i) for i in state["completion_ids"]],
        logp_rollout=np.asarray(state["logp_rollout"]),
        mask=state["mask"],
        streams=dict(state["streams"]),
    )
