"""What of TRL's arguments is passed on, and what is refused with our setting named."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import trl

from envs.errors import UserError
from trainers.trl_arguments import CONFIGS, GENERATION, check_trl_arguments, ours_for, trl_config, trl_names


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_names_read_from_the_source_are_those_of_the_class(kind: str) -> None:
    fields = dataclasses.fields(getattr(trl, CONFIGS[kind][1]))
    assert trl_names(kind) == {f.name for f in fields if f.init and not f.name.startswith("_")}


def test_reading_them_loads_neither_trl_nor_torch() -> None:
    code = (
        "import sys; from trainers.trl_arguments import check_trl_arguments as c;"
        "c('sft', {'packing': True});"
        "print(sorted({'trl', 'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(GENERATION))
def test_arguments_about_generation_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"TRL's argument {name} has a setting of ours") as error:
        check_trl_arguments("policy", {name: 1})
    assert GENERATION[name] in str(error.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("scale_rewards", "reward.scale"),
        ("mask_truncated_completions", "rollout.mask_cut"),
        ("vllm_mode", "rollout.engine"),
        ("vllm_gpu_memory_utilization", "rollout.options"),
        ("learning_rate", "learner.lr"),
        ("deepspeed", "learner.backend"),
        ("gradient_checkpointing", "model.gradient_checkpointing"),
    ],
)
def test_what_has_a_setting_of_ours_is_refused(name: str, ours: str) -> None:
    with pytest.raises(UserError, match="has a setting of ours") as error:
        check_trl_arguments("policy", {name: 1})
    assert ours in str(error.value)


def test_every_argument_about_generation_that_trl_has_is_known_here() -> None:
    """A new one of TRL's would otherwise be passed on in silence."""
    words = ("generat", "vllm", "temperature", "top_", "min_p", "completion_length", "continuous_batching")
    of_a_loss = {"top_entropy_quantile", "sapo_temperature_neg", "sapo_temperature_pos"}
    about = {n for n in trl_names("policy") if any(word in n for word in words)} - of_a_loss
    assert len(about) > 20
    assert not {n for n in about if ours_for(n, "policy") is None}


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match="TRL's SFTConfig has no argument 'pack'") as error:
        check_trl_arguments("sft", {"pack": True})
    assert "packing" in str(error.value)
    with pytest.raises(UserError, match="DPOConfig has no argument 'packing'"):
        check_trl_arguments("dpo", {"packing": True})


def test_the_users_arguments_reach_trl_over_the_defaults(tmp_path: Any) -> None:
    args = trl_config("sft", {"weight_decay": 0.3, "bf16": False}, output_dir=str(tmp_path), max_steps=3)
    assert (args.weight_decay, args.max_steps, args.gradient_checkpointing) == (0.3, 3, False)
    assert (args.bf16, args.logging_nan_inf_filter, args.logging_steps) == (False, False, 1)
    assert args.report_to == []


@pytest.mark.parametrize("value", [{"lr_scheduler_type": "no such"}, {"bf16": True, "fp16": True}])
def test_a_value_that_trl_refuses_is_the_users_error(value: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(UserError, match="refuses its arguments") as error:
        trl_config("sft", value, output_dir=str(tmp_path))
    assert f"learner.trl.{next(iter(value))}" in str(error.value)
