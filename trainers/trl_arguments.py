"""Which of TRL's arguments a user may pass on (`learner.trl.<name>=`), and the TRL config of a learner.

The names are read from TRL's source without importing it, so that a wrong one is told before anything heavy
is loaded. Arguments about generation and those that have a setting of ours are refused, ours named.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envs.errors import UserError, nearest

# kind of learner: where TRL defines its arguments
CONFIGS = {
    "policy": ("trl/trainer/grpo_config.py", "GRPOConfig"),
    "sft": ("trl/trainer/sft_config.py", "SFTConfig"),
    "pretrain": ("trl/trainer/sft_config.py", "SFTConfig"),
    "dpo": ("trl/trainer/dpo_config.py", "DPOConfig"),
    "reward_model": ("trl/trainer/reward_config.py", "RewardConfig"),
}
BASES = (
    ("trl/trainer/base_config.py", "_BaseConfig"),
    ("transformers/training_args.py", "TrainingArguments"),
)

# What generates is the rollout pool, whatever the learner.
GENERATION = {
    "use_vllm": "rollout.engine",
    "use_transformers_continuous_batching": "rollout.engine and run.deterministic",
    "transformers_continuous_batching_config": "rollout.engine and run.deterministic",
    "environment_factory": "env.task, and rewards for what it checks",
    "tools": "env.task, and rewards for what it checks",
    "max_completion_length": "rollout.max_new_tokens",
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_eval": "rollout.samples_per_prompt",
    "generation_batch_size": "rollout.prompts_per_step and rollout.samples_per_prompt",
    "steps_per_generation": "rollout.prompts_per_step and rollout.samples_per_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.top_p or rollout.top_k",
    "repetition_penalty": "rollout.temperature",
    "generation_kwargs": "the settings under rollout",
    "cache_implementation": "rollout.engine",
    "ds3_gather_for_generation": "learner.backend; weights are published whole",
    "reward_weights": "reward.weights",
    "log_completions": "samples.jsonl of the run, which always holds some",
    "num_completions_to_print": "samples.jsonl of the run, which always holds some",
}
# What TRL's own generation and rewards would have read; the policy's rows come from the Feed.
POLICY = {
    "scale_rewards": "reward.scale",
    "mask_truncated_completions": "rollout.mask_cut",
    "multi_objective_aggregation": "reward.weights; rewards are summed, then scaled",
    "chat_template_kwargs": "the chat template of the model's tokenizer",
    "max_tool_calling_iterations": "env.task, and rewards for what it checks",
    "use_transformers_paged": "rollout.engine and run.deterministic",
    "log_multimodal": "samples.jsonl of the run, which always holds some",
    "log_unique_prompts": "samples.jsonl of the run, which always holds some",
    "log_completions_hub_repo": "samples.jsonl of the run, which always holds some",
    "pad_to_multiple_of": "nothing: rows are as long as the longest",
    "shuffle_dataset": "run.seed; every pass over the prompts is shuffled",
    "remove_unused_columns": "nothing: every column is kept as the samples' meta",
}
# What has a setting of ours.
OURS = {
    "output_dir": "run.dir and run.name",
    "learning_rate": "learner.lr",
    "max_steps": "learner.steps",
    "num_train_epochs": "learner.steps",
    "per_device_train_batch_size": "learner.samples_per_device_batch",
    "gradient_accumulation_steps": "learner.samples_per_device_batch",
    "auto_find_batch_size": "learner.samples_per_device_batch",
    "max_grad_norm": "learner.max_grad_norm",
    "max_length": "learner.max_length",
    "beta": "learner.beta",
    "epsilon": "learner.epsilon",
    "num_iterations": "learner.num_iterations",
    "loss_type": "learner.loss_type",
    "deepspeed": "learner.backend=zero2 or zero3",
    "fsdp": "learner.backend=zero2 or zero3",
    "fsdp_config": "learner.backend=zero2 or zero3",
    "accelerator_config": "learner.backend",
    "use_cpu": "nothing: a GPU is used where Ray or torch finds one",
    "seed": "run.seed",
    "full_determinism": "run.deterministic",
    "save_strategy": "run.checkpoint_every",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
    "save_only_model": "run.checkpoint_every",
    "save_on_each_node": "run.checkpoint_every",
    "enable_jit_checkpoint": "run.checkpoint_every",
    "load_best_model_at_end": "run.checkpoint_every",
    "resume_from_checkpoint": "resume=<name of the run>",
    "ignore_data_skip": "resume=<name of the run>",
    "restore_callback_states_from_checkpoint": "resume=<name of the run>",
    "logging_strategy": "metrics.jsonl, which has every step",
    "logging_steps": "metrics.jsonl, which has every step",
    "logging_first_step": "metrics.jsonl, which has every step",
    "logging_nan_inf_filter": "nothing: a loss that is not finite ends the run and is explained",
    "disable_tqdm": "run.display",
    "report_to": "run.tensorboard",
    "run_name": "run.name",
    "model_init_kwargs": "the settings under model",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "trust_remote_code": "model.trust_remote_code",
}
# Settings of ours that TRL knows by the same name, for some kinds; None leaves TRL's default.
LOSS_SETTINGS = {"beta": None, "epsilon": None, "loss_type": None, "num_iterations": 1, "max_length": None}
PREFIXES = {"vllm_": "rollout.engine and rollout.options", "push_to_hub": "nothing", "hub_": "nothing"}


@functools.cache
def trl_names(kind: str) -> frozenset[str]:
    """Every argument of the TRL config of this kind of learner, read from its source."""
    names: set[str] = set()
    for file, name in (CONFIGS[kind], *BASES):
        package, _, path = file.partition("/")
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"the package {package} is not installed", fix="pip install -e '.[language]'")
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text(encoding="utf-8"))
        (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
        names |= {
            node.target.id
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return frozenset(n for n in names if not n.startswith("_"))


def ours_for(name: str, kind: str) -> str | None:
    """The setting of ours that stands for TRL's argument `name`; None: TRL's own is passed on."""
    if kind == "policy" and name in POLICY:
        return POLICY[name]
    prefixed = next((ours for prefix, ours in PREFIXES.items() if name.startswith(prefix)), None)
    return GENERATION.get(name) or OURS.get(name) or prefixed


def check_trl_arguments(kind: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that TRL does not have, or that has a setting of ours."""
    for name, value in arguments.items():
        ours = ours_for(name, kind)
        if ours is not None:
            raise UserError(
                f"TRL's argument {name} has a setting of ours",
                given=f"learner.trl.{name}={value}",
                fix=f"use {ours}",
            )
        names = trl_names(kind)
        if name not in names:
            open_names = [n for n in names if ours_for(n, kind) is None]
            raise UserError(
                f"TRL's {CONFIGS[kind][1]} has no argument {name!r}",
                given=f"learner.trl.{name}={value}",
                allowed=nearest(name, open_names),
            )


def loss_settings(kind: str, learner: Any) -> dict[str, Any]:
    """The settings of the section `learner` that TRL's config of this kind has and that were made."""
    values = {name: getattr(learner, name) for name in LOSS_SETTINGS}
    return {name: value for name, value in values.items() if value is not None and name in trl_names(kind)}


def check_loss_settings(kind: str, learner: Any) -> None:
    """Raise UserError for a setting of the section `learner` that this kind of learner has no use for."""
    for name, idle in LOSS_SETTINGS.items():
        value = getattr(learner, name)
        if name not in trl_names(kind) and value not in (None, idle):
            raise UserError(
                f"learner.{name} means nothing to {kind}",
                given=f"learner.{name}={value}",
                fix="leave it out",
            )


def trl_config(kind: str, arguments: Mapping[str, Any], **ours: Any) -> Any:
    """The TRL config of a learner: what every learner of ours needs, then `ours`, then the user's arguments.

    Raises UserError for an argument that is refused, and for a value that TRL refuses.
    """
    import torch
    import trl

    check_trl_arguments(kind, arguments)
    always = {
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    try:
        with warnings.catch_warnings():
            # TRL's own name for it, which transformers is about to change.
            warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
            return getattr(trl, CONFIGS[kind][1])(**{**always, **ours, **arguments})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"TRL's {CONFIGS[kind][1]} refuses its arguments: {error}",
            given=", ".join(f"learner.trl.{name}={value}" for name, value in arguments.items()) or None,
        ) from error
