"""Evaluation of language models on a text task: greedy accuracy and pass@k, through a rollout pool.

A run's newest checkpoint in; a table, evaluation.json and evaluation_samples.jsonl out. Trains nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from evaluators.statistics import Summary, mean_summary, rate_summary
from rewards.functions import make_rewards
from rewards.reward import Value
from rollouts.samples import Request, Sample, SamplingParams
from trainers.checkpoint import write_error
from trainers.config import typed
from trainers.files import replace_file
from trainers.run import Run

SAMPLES = 8  # per prompt, for pass@k
CHECK_DEADLINE_S = 120.0  # of all checks, where they run in a child process


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a right one, when `correct` are right.

    1 - C(n - correct, k) / C(n, k): without bias for the chance that k fresh samples hold one (Chen et al.
    2021, "Evaluating Large Language Models Trained on Code"). ValueError unless 0 <= correct <= n and
    1 <= k <= n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, not {correct=}, {n=}, {k=}")
    if n - correct < k:
        return 1.0
    return -math.expm1(sum(math.log1p(-k / i) for i in range(n - correct + 1, n + 1)))


def ks_for(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def share_summary(values: Sequence[float]) -> Summary:
    """Mean of one value in [0, 1] a prompt, with its 95 % interval over prompts.

    Where all are 0 or 1 Wilson's interval, which has a width even if all are equal; else Student's, cut to
    [0, 1]. The prompts are the sample: what varies within one is part of its value.
    """
    if np.isin(values, (0.0, 1.0)).all():
        return rate_summary(np.asarray(values) == 1.0)
    summary = mean_summary(values)
    if summary["ci95"] is not None:
        low, high = summary["ci95"]
        summary["ci95"] = [max(0.0, low), min(1.0, high)]
    return summary


@dataclass(kw_only=True)
class Answers:
    """Samples of every prompt, and whether each is right (None: its check failed)."""

    groups: list[list[Sample]]
    right: list[list[bool | None]]

    def accuracy(self) -> Summary | None:
        """Share of right answers among the first of each prompt; None when no check worked."""
        known = [row[0] for row in self.right if row[0] is not None]
        return rate_summary(known) if known else None

    def pass_at(self, k: int) -> Summary | None:
        """pass@k over the prompts that have k answers whose checks worked; None without any."""
        values = []
        for row in self.right:
            known = [right for right in row if right is not None]
            if len(known) >= k:
                values.append(pass_at_k(len(known), sum(known), k))
        return share_summary(values) if values else None

    def failures(self) -> int:
        """Checks that failed."""
        return sum(right is None for row in self.right for right in row)


def answer(
    pool: Any,
    tokenizer: Any,
    task: Any,
    *,
    prompts: int,
    samples: int,
    params: SamplingParams,
    seed: int,
    encode: Callable[[Any, Any], list[int]],
    decode: Callable[[Any, Sample], str],
) -> Answers:
    """`samples` answers to each of the first `prompts` evaluation prompts, checked by the task.

    pool: anything with `sample`; encode, decode: between texts and ids, as the learner does it
    (`trainers.feed_batch`).
    """
    asked = [task.eval(i) for i in range(prompts)]
    requests = [
        Request(
            prompt_ids=encode(tokenizer, prompt),
            n=samples,
            params=params,
            seed=(seed, i),
            group=i,
            meta={**prompt.meta, "prompt_id": prompt.id},
        )
        for i, prompt in enumerate(asked)
    ]
    drawn = pool.sample(requests)
    for sample in drawn:
        prompt = asked[sample.group]
        sample.prompt = prompt.text if prompt.text is not None else json.dumps(prompt.messages)
        sample.completion = decode(tokenizer, sample)
    groups = [drawn[i : i + samples] for i in range(0, len(drawn), samples)]
    return Answers(groups=groups, right=check(task, groups))


def check(task: Any, groups: list[list[Sample]]) -> list[list[bool | None]]:
    """Whether each sample is right by the task's check; None where the check failed."""
    ((_, _, rewarder),) = make_rewards(["exact"], None, task, deadline_s=CHECK_DEADLINE_S)
    try:
        scores = rewarder.score(groups, None)
    finally:
        if hasattr(rewarder, "close"):
            rewarder.close()
    return [[s.x >= 1.0 if isinstance(s, Value) else None for s in row] for row in scores]


# --- a run


def evaluate_run(
    run_path: str | Path, episodes: int = 100, seed: int = 0, samples: int = SAMPLES
) -> dict[str, Any]:
    """Answer `episodes` evaluation prompts with the run's newest checkpoint; write evaluation.json.

    Once greedily, and `samples` times as the policy samples in training (at temperature 1 for a learner
    without rollouts). At most the task's `eval_size` prompts. Raises UserError without a usable checkpoint.
    """
    for name, value in (("episodes", episodes), ("samples", samples)):
        if value < 1:
            raise UserError(f"{name} must be at least 1", given=value)
    run = Run.open(run_path)
    cfg = typed(run.config)
    if cfg.algorithm.kind == "reward_model":
        raise UserError(
            "a reward model writes no answers", given=run.name, fix="evaluate a policy that learns from it"
        )
    from envs.text_tasks import make_task
    from trainers.language import sampling

    task = make_task(cfg.env)
    params = sampling(cfg)
    params.check()
    prompts = min(episodes, task.eval_size)
    step, pool, tokenizer = _pool(cfg, run, task)
    from trainers.feed_batch import decode, encode

    common: dict[str, Any] = {"prompts": prompts, "seed": seed, "encode": encode, "decode": decode}
    try:
        greedy_params = SamplingParams(max_new_tokens=params.max_new_tokens, temperature=0.0)
        greedy = answer(pool, tokenizer, task, samples=1, params=greedy_params, **common)
        sampled = answer(pool, tokenizer, task, samples=samples, params=params, **common)
    finally:
        pool.close()
    result = {
        **summarize(greedy, sampled, samples),
        "run": run.name,
        "task": cfg.env.task,
        "checkpoint_step": step,
        "temperature": params.temperature,
        "seed": seed,
    }
    _write(run.path / "evaluation_samples.jsonl", "".join(_lines(greedy)))
    _write(run.path / "evaluation.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
    return result


def summarize(greedy: Answers, sampled: Answers, samples: int) -> dict[str, Any]:
    """greedy_accuracy, pass_at_k by k, completion_tokens and how many were cut; all with intervals."""
    drawn = [sample for group in sampled.groups for sample in group]
    # Answers to one prompt are not independent: the interval is over prompts.
    lengths = [float(np.mean([len(s.completion_ids) for s in group])) for group in sampled.groups]
    return {
        "greedy_accuracy": greedy.accuracy(),
        "pass_at_k": {str(k): sampled.pass_at(k) for k in ks_for(samples)},
        "completion_tokens": mean_summary(lengths),
        "cut_share": float(np.mean([s.finish == "length" for s in drawn])),
        "failed_checks": greedy.failures() + sampled.failures(),
        "prompts": len(sampled.groups),
        "samples_per_prompt": samples,
    }


def print_table(result: dict[str, Any]) -> None:
    """The evaluation as a table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{result['run']}, step {result['checkpoint_step']}: {result['prompts']} prompts of {result['task']}"
    )
    table = Table(title=title)
    table.add_column("95 % confidence over prompts in brackets")
    table.add_column(f"{result['samples_per_prompt']} samples a prompt", justify="right")
    table.add_row("greedy answer right", _percent(result["greedy_accuracy"]))
    for k, summary in result["pass_at_k"].items():
        table.add_row(f"pass@{k}, temperature {result['temperature']:g}", _percent(summary))
    table.add_row("tokens a completion", f"{result['completion_tokens']['mean']:.1f}")
    table.add_row("completions cut off", f"{result['cut_share']:.0%}")
    if result["failed_checks"]:
        table.add_row("checks that failed (left out)", str(result["failed_checks"]))
    Console().print(table)


def _percent(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    ci = summary["ci95"]
    return f"{summary['mean']:.1%}" + ("" if ci is None else f" [{ci[0]:.1%}, {ci[1]:.1%}]")


def _pool(cfg: Any, run: Run, task: Any) -> tuple[int, Any, Any]:
    """(step, pool in this process, tokenizer) of the run's newest checkpoint."""
    from rollouts.engine import EngineSpec
    from rollouts.pool import RolloutPool
    from trainers.language import save_model
    from trainers.models import load_tokenizer, prepare_model

    saved = run.latest()
    folder = save_model(cfg, run, str(prepare_model(cfg.model, task))) if saved else None
    if saved is None or folder is None:
        raise UserError(
            f"run {run.name!r} has no checkpoint yet",
            given=str(run.path / "checkpoints"),
            fix="let it train up to its first checkpoint (run.checkpoint_every), then evaluate",
        )
    spec = EngineSpec(
        model_path=str(folder),
        kind=cfg.rollout.engine,
        dtype=cfg.model.dtype,
        deterministic=cfg.run.deterministic,
        options=dict(cfg.rollout.options),
    )
    return saved[0], RolloutPool(spec), load_tokenizer(folder, cfg.model)


def _lines(greedy: Answers) -> list[str]:
    return [
        json.dumps({"prompt": s.prompt, "completion": s.completion, "finish": s.finish, "right": right})
        + "\n"
        for group, rights in zip(greedy.groups, greedy.right)
        for s, right in zip(group, rights)
    ]


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        fix = "make room or restore access there, then repeat"
        raise write_error(error, "the evaluation", path, fix) from error
