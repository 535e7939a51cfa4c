"""Language engine, the light half: its config, its arithmetic and checks, and how the parts are put together.

Rollout pool, Feed and learner are `rollouts.pool`, `trainers.feed` and `trainers.policy` (or
`trainers.learners`). This module imports none of torch, transformers, TRL and Ray until `train` is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.errors import UserError
from envs.text_tasks import TextTaskConfig, check_task_config, make_task
from rollouts.samples import SamplingParams
from trainers.models import ModelConfig, check_model_config
from trainers.placement import check_placement, run_learner
from trainers.trl_arguments import check_trl_arguments

if TYPE_CHECKING:
    import numpy as np

    from rollouts.samples import Sample
    from trainers.run import Run


@dataclass(kw_only=True)
class LanguageRolloutConfig:
    """How completions are drawn. A batch is `prompts_per_step * samples_per_prompt` completions."""

    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    mask_cut: bool = False  # do not learn from completions that were cut off at max_new_tokens
    engine: str = "transformers"  # transformers | masked_diffusion | package.module:Class
    num_workers: int = 1  # processes with an engine; 0 draws in the process of the Feed
    staleness: int = 0  # batches drawn ahead: 0 waits for the newest weights
    off_policy_cap: float = 2.0  # of the weight learner / rollout, where they can differ
    deadline_s: float = 600.0
    max_restarts: int = 10  # of one worker
    options: dict[str, Any] = field(default_factory=dict)  # of the engine's class


@dataclass(kw_only=True)
class LanguageLearnerConfig:
    """The optimizer's settings, and where the learner runs. None leaves TRL's own default."""

    lr: float | None = None  # None: TINY_LR_POLICY or TINY_LR_ROWS with model=tiny
    steps: int = 60  # optimizer steps of the run
    samples_per_step: int = 32  # rows of a step, for learners that need no rollouts
    samples_per_device_batch: int = 32  # rows of one forward and backward pass in one process
    num_workers: int = 0  # processes of Ray Train; 0: in the driver
    backend: str = "ddp"  # ddp | zero2 | zero3
    max_restarts: int = 3  # of the group of workers
    timeout_s: float = 1800.0  # without a message from the workers
    max_grad_norm: float = 1.0
    beta: float | None = None  # weight of the KL term
    epsilon: float | None = None  # of the ratio's clipping
    num_iterations: int = 1  # optimizer steps on one batch of completions
    loss_type: str | None = None  # see TRL
    max_length: int | None = None  # tokens of a row, for learners that need no rollouts
    callbacks: list[str] = field(default_factory=list)  # transformers' TrainerCallback classes, by path
    trl: dict[str, Any] = field(default_factory=dict)  # any other argument of TRL's config


@dataclass(kw_only=True)
class RewardConfig:
    """Which rewards judge a completion (see rewards/functions.py); their weighted sum is learned from."""

    names: list[str] = field(default_factory=lambda: ["exact"])
    weights: list[float] | None = None  # None: 1 each
    max_failure_rate: float = 0.1  # of samples, over the run; above it the run stops
    scale: str = "group"  # advantages are divided by the std of: group | batch | none
    deadline_s: float = 30.0  # of a reward in a child process, per batch


# Where TRL's losses differ from its default about samples that are not learned from, and about the split.
LOSS_CAVEATS = {
    **dict.fromkeys(
        ("grpo", "sapo", "dr_grpo", "luspo"),
        "a mean over rows: one whose reward failed adds nothing, but is counted",
    ),
    "bnpo": "every micro-batch has its own denominator: the gradient depends on the split",
}
SECTIONS = {
    "env": TextTaskConfig,
    "model": ModelConfig,
    "rollout": LanguageRolloutConfig,
    "learner": LanguageLearnerConfig,
    "reward": RewardConfig,
}
KINDS = ("policy", "sft", "pretrain", "dpo", "reward_model")
# Of model=tiny, to write and to learn from rows; TRL's own rates are for models 1000 times as large.
TINY_LR_POLICY, TINY_LR_ROWS = 1e-4, 1e-3
ENVS = ("chained-arithmetic", "countdown", "sudoku4", "reasoning-gym", "dataset")  # the default first
EVALUATOR = "evaluators.language"
WORKERS = "rollout.num_workers and learner.num_workers"


def extras(cfg: Any) -> list[str]:
    """Optional dependencies that a config needs."""
    needed = ["language"]
    if cfg.learner.backend != "ddp":
        needed.append("deepspeed")
    if cfg.env.task.startswith("reasoning_gym") or "math" in cfg.reward.names:
        needed.append("data")
    return needed


class LanguageAlgorithm:
    """The seams of a language algorithm. Left alone it is what `kind` says: GRPO, SFT, DPO, ...

    An instance lives in every learner process and in the Feed; what `state_dict` returns survives restarts.
    """

    engine = "trainers.language"
    kind = "policy"
    Config: type
    headline: tuple[tuple[str, str], ...] = ()  # (label, metric) shown beside the reward

    # (model, samples) -> {stream: one array (T, ...) a sample}; no-grad, learner's weights, before rewards
    observe: Callable[[Any, list[Sample]], dict[str, list[np.ndarray]]] | None = None
    # (groups, advantages (P, G)) -> one array (T,) a sample; whole groups, in the Feed
    credit: Callable[[list[list[Sample]], np.ndarray], list[np.ndarray]] | None = None
    # log_probs(model, inputs) -> (log-probabilities, entropies), (B, T); for old, reference and current;
    # its attribute `exact`, if it has one: whether these are the sampler's own, any difference an error
    likelihood: Any = None
    # the engine of ENGINES whose completions `likelihood` scores; None: those written left to right
    engine_kind: str | None = None
    # (model, batch of the collator) -> mean over its rows; kinds "sft" and "pretrain", in the place of TRL's
    loss: Callable[[Any, dict[str, Any]], Any] | None = None
    # (logits (N, V), labels (N)) -> weights (N), without gradient; see trainers.token_weight; kind "sft"
    token_weight: Callable[[Any, Any], Any] | None = None
    # (micro-batches of a step, learner) -> as many micro-batches
    compose: Callable[[list[Any], Any], list[Any]] | None = None
    # (gradients (n, d)) -> (d), before clipping; a row is a micro-batch of one worker
    aggregate: Callable[[Any], Any] | None = None
    # (learner, step) -> metrics, after every optimizer step
    after_step: Callable[[Any, int], dict[str, Any]] | None = None

    def __init__(self, config: Any, seed: int):
        self.config, self.seed = config, seed

    @classmethod
    def check(cls, cfg: Any) -> None:
        """Raise UserError for settings that cannot work; called before anything starts."""

    @classmethod
    def describe(cls, cfg: Any) -> list[str]:
        """Lines of derived arithmetic and caveats, printed before the run."""
        return []

    def prepare(self, cfg: Any, tokenizer: Any) -> None:
        """Called once in every process that holds the algorithm, with the whole config, before it is used."""

    def rewards(self, cfg: Any, task: Any) -> Any:
        """Named rewards with weights; a paper may bring its own."""
        from rewards.functions import make_rewards

        return make_rewards(cfg.reward.names, cfg.reward.weights, task, deadline_s=cfg.reward.deadline_s)

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive a restart, as a checkpoint tree."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of `state_dict`."""


# --- arithmetic and checks


def completions(cfg: Any) -> int:
    """Completions of one batch."""
    return cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt


def step_rows(cfg: Any) -> int:
    """Rows of one optimizer step, over all processes."""
    return completions(cfg) if cfg.algorithm.kind == "policy" else cfg.learner.samples_per_step


def world(cfg: Any) -> int:
    """Learner processes."""
    return max(1, cfg.learner.num_workers)


def planned_iterations(cfg: Any) -> int:
    """Optimizer steps the run takes, capped by run.max_steps."""
    return min(cfg.learner.steps, cfg.run.max_steps or cfg.learner.steps)


def learning_rate(cfg: Any) -> dict[str, float]:
    """TRL's argument `learning_rate`; empty where TRL's own default is meant."""
    if cfg.learner.lr is not None:
        return {"learning_rate": cfg.learner.lr}
    if cfg.model.name == "tiny":
        return {"learning_rate": TINY_LR_POLICY if cfg.algorithm.kind == "policy" else TINY_LR_ROWS}
    return {}


def check(cfg: Any) -> None:
    """Every check that needs no model, no Ray and no download. Raises UserError."""
    kind = cfg.algorithm.kind
    check_task_config(cfg.env)
    check_model_config(cfg.model)
    check_placement(cfg)
    check_trl_arguments(kind, cfg.learner.trl)
    r, c, w = cfg.rollout, cfg.learner, cfg.reward
    for name, value, low in (
        ("rollout.prompts_per_step", r.prompts_per_step, 1),
        ("rollout.num_workers", r.num_workers, 0),
        ("rollout.staleness", r.staleness, 0),
        ("rollout.max_restarts", r.max_restarts, 0),
        ("learner.steps", c.steps, 1),
        ("learner.samples_per_step", c.samples_per_step, 1),
        ("learner.samples_per_device_batch", c.samples_per_device_batch, 1),
        ("learner.num_iterations", c.num_iterations, 1),
        ("learner.max_restarts", c.max_restarts, 0),
        ("learner.lr", c.lr or 0, 0),
    ):
        if not low <= value < math.inf:
            raise UserError(f"{name} must be at least {low}", given=value, allowed=f"[{low}, inf)")
    for name, value in (
        ("rollout.deadline_s", r.deadline_s),
        ("learner.timeout_s", c.timeout_s),
        ("learner.max_grad_norm", c.max_grad_norm),
    ):
        if not value > 0:
            raise UserError(f"{name} must be more than 0", given=value)
    if kind == "policy":
        _check_policy(cfg, r, w)
    rows, micro = step_rows(cfg), c.samples_per_device_batch
    if rows % (world(cfg) * micro):
        made_of = (
            f"rollout.prompts_per_step={r.prompts_per_step} x "
            f"rollout.samples_per_prompt={r.samples_per_prompt}"
            if kind == "policy"
            else "learner.samples_per_step"
        )
        raise UserError(
            "a step's rows do not divide into whole micro-batches",
            given=f"{made_of} = {rows} rows; {world(cfg)} learner process(es) x "
            f"learner.samples_per_device_batch={micro} = {world(cfg) * micro} at a time: "
            f"{rows} / {world(cfg) * micro} = {rows / (world(cfg) * micro):.3g}",
            allowed="a whole number",
            fix=f"set learner.samples_per_device_batch to a divisor of {rows // world(cfg)}"
            if rows % world(cfg) == 0
            else f"make the rows a multiple of learner.num_workers={world(cfg)}",
        )
    cfg.algorithm.check(cfg)


def _check_policy(cfg: Any, r: LanguageRolloutConfig, w: RewardConfig) -> None:
    from rewards.functions import check_rewards
    from rollouts.engine import ENGINES, OTHER_ARITHMETIC, EngineSpec
    from trainers.credit import SCALES

    sampling(cfg).check()
    EngineSpec(model_path="", kind=r.engine).check()
    wanted = cfg.algorithm.engine_kind
    other_order = wanted or "masked_diffusion"  # the engine that does not write left to right
    if ":" not in r.engine and (r.engine == other_order) != (wanted is not None):
        raise UserError(
            f"algo={cfg.algo.name} can't score what this engine draws",
            given=f"rollout.engine={r.engine}",
            allowed=wanted or [name for name in ENGINES if name != other_order],
        )
    if r.engine in OTHER_ARITHMETIC and cfg.run.deterministic:
        raise UserError(
            f"the engine {r.engine} does not draw the same samples bit for bit",
            given=f"rollout.engine={r.engine} with run.deterministic=true",
            fix="run.deterministic=false, or rollout.engine=transformers",
        )
    if r.samples_per_prompt < 2:
        raise UserError(
            "advantages compare the completions of one prompt, so there must be two or more",
            given=f"rollout.samples_per_prompt={r.samples_per_prompt}",
            allowed=">= 2",
        )
    if r.temperature == 0:
        raise UserError(
            "greedy completions of one prompt are all the same: there is nothing to learn from",
            given="rollout.temperature=0",
            allowed="more than 0",
        )
    if not r.off_policy_cap >= 1:
        raise UserError("rollout.off_policy_cap must be at least 1", given=r.off_policy_cap)
    if w.scale not in SCALES:
        raise UserError("unknown reward.scale", given=w.scale, allowed=SCALES)
    if not 0 <= w.max_failure_rate <= 1:
        raise UserError("reward.max_failure_rate is a share", given=w.max_failure_rate, allowed="[0, 1]")
    if w.weights is not None and len(w.weights) != len(w.names):
        raise UserError(
            "every reward needs one weight",
            given=f"{len(w.names)} reward.names, {len(w.weights)} reward.weights",
        )
    check_rewards(w.names)
    if r.staleness and r.num_workers == 0:
        raise UserError(
            "drawing ahead while the learner works needs another process",
            given=f"rollout.staleness={r.staleness}, rollout.num_workers=0",
            fix="set rollout.num_workers=1",
        )
    if cfg.learner.num_workers and r.num_workers == 0:
        raise UserError(
            "learners in other processes need rollout workers beside them",
            given=f"learner.num_workers={cfg.learner.num_workers}, rollout.num_workers=0",
            fix="set rollout.num_workers=1",
        )
    if cfg.learner.backend == "zero3":
        raise UserError(
            "a policy's weights are published whole after every step, which zero3 splits",
            given="learner.backend=zero3",
            allowed=("ddp", "zero2"),
        )


def describe(cfg: Any) -> list[str]:
    """The arithmetic derived from the config, one line each."""
    r, c, rows = cfg.rollout, cfg.learner, step_rows(cfg)
    steps, micro = planned_iterations(cfg), c.samples_per_device_batch
    where = f"{c.num_workers} processes ({c.backend})" if c.num_workers else "the driver"
    lines = []
    if cfg.algorithm.kind == "policy":
        batches = -(-steps // c.num_iterations)
        lines += [
            f"{r.prompts_per_step} prompts x {r.samples_per_prompt} samples = {rows} completions a batch, "
            f"at most {r.max_new_tokens} tokens each; {batches} batches, "
            f"{c.num_iterations} optimizer step(s) on each",
            f"drawn by {r.num_workers or 'no'} rollout worker(s) ({r.engine}), "
            + (f"{r.staleness} batch(es) ahead of the learner" if r.staleness else "with the newest weights"),
        ]
        if c.loss_type in LOSS_CAVEATS:
            lines.append(f"learner.loss_type={c.loss_type}: {LOSS_CAVEATS[c.loss_type]}")
    lines.append(
        f"{steps} steps x {rows} rows = {world(cfg)} process(es) x {micro} per micro-batch x "
        f"{rows // (world(cfg) * micro)} accumulated; in {where}"
    )
    if c.lr is None:
        rate = learning_rate(cfg).get("learning_rate")
        lines.append(f"learner.lr: {rate:g}, for model=tiny" if rate else "learner.lr: TRL's own default")
    return lines + cfg.algorithm.describe(cfg)


def resources(cfg: Any) -> dict[str, float]:
    """CPUs that are busy at once, and memory in GiB: measured for the tiny model, without a larger one's."""
    workers = cfg.learner.num_workers + (cfg.rollout.num_workers if cfg.algorithm.kind == "policy" else 0)
    return {"cpus": max(1, workers), "memory_gib": 1.5 + 0.8 * workers}


def sampling(cfg: Any) -> SamplingParams:
    """How the policy's completions are drawn."""
    r = cfg.rollout
    return SamplingParams(
        max_new_tokens=r.max_new_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k
    )


# --- the run


def train(cfg: Any, run: Run) -> None:
    """Prepare the model, train, and leave a folder `model/` that transformers loads. Resumes by itself.

    Raises UserError for what the user can mend; the run's last checkpoint stays whole in every case.
    """
    import os

    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not _has_gpu() else "cuda")
    from trainers.display import HeadlineItem
    from trainers.learners import check_learner
    from trainers.models import prepare_model

    task = make_task(cfg.env)
    steps = planned_iterations(cfg)
    first = [HeadlineItem("reward", "reward"), HeadlineItem("tokens", "completion_length")]
    if cfg.algorithm.kind != "policy":
        first = [HeadlineItem("loss", "loss")]
    run.plan(steps, 0, [*first, *(HeadlineItem(*item) for item in cfg.algorithm.headline)])
    with run.starting():
        check_learner(cfg.algorithm.kind, cfg)
        model_path = prepare_model(cfg.model, task, say=run.event)
    if cfg.algorithm.kind == "policy":
        _train_policy(cfg, run, task, model_path)
    else:
        from trainers.learners import LearnerMaker

        run_learner(
            LearnerMaker(kind=cfg.algorithm.kind, cfg=cfg, model_path=str(model_path), task=task), cfg, run
        )
    save_model(cfg, run, str(model_path))


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def _train_policy(cfg: Any, run: Run, task: Any, model_path: Any) -> None:
    from trainers.policy_run import PolicyMaker, feed_for

    with ExitStack() as stack:
        with run.starting():
            feed = feed_for(cfg, run, task, str(model_path), stack)
        run_learner(PolicyMaker(cfg=cfg, model_path=str(model_path), feed=feed), cfg, run)


def save_model(cfg: Any, run: Run, model_path: str) -> Path | None:
    """Write the newest checkpoint's model to `<run>/model`: safetensors, tokenizer, card; None without one.

    Adapters are merged into the weights they sit on.
    """
    from trainers.model_output import export_model

    saved = run.latest()
    if saved is None:
        return None
    facts = {"run": run.name, "algorithm": cfg.algo.name, "task": cfg.env.task, "step": saved[0]}
    return export_model(cfg.algorithm.kind, cfg, model_path, saved[1], run.path / "model", facts)
