"""A tiny language model, a few rows to learn from, and learners on them; what two runs are compared by."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import TrainerCallback

from trainers.placement import WorkerContext, backend_arguments, run_learner
from trainers.run import Run, RunConfig

WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "="]
STEPS, ROWS = 6, 20  # 20 rows in batches of 8: the epochs end between optimizer steps 3 and 4


def make_model(folder: Path, dropout: float = 0.1) -> str:
    """A Llama of 30 thousand random weights and a word-level tokenizer, saved in `folder`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, attention_dropout=dropout,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows(kind: str) -> dict[str, list[str]]:
    """Sums of two digits modulo ten, in the columns that TRL's trainer of this kind asks for."""
    pairs = [(i % 10, i // 2 % 10) for i in range(ROWS)]
    prompts = [f"{a} + {b} = " for a, b in pairs]
    right, wrong = [str((a + b) % 10) for a, b in pairs], [str((a + b + 1) % 10) for a, b in pairs]
    if kind == "sft":
        return {"prompt": prompts, "completion": right}
    if kind == "pretrain":
        return {"text": [p + c for p, c in zip(prompts, right, strict=True)]}
    return {"prompt": prompts, "chosen": right, "rejected": wrong}


@dataclass
class Recipe:
    """What a test changes about a small learner; `fault`: (attempt, step, rank) at which a worker dies."""

    kind: str = "sft"
    model: str = ""
    workers: int = 0
    backend: str = "ddp"
    steps: int = STEPS
    stop_after: int | None = None
    micro: int = 4
    every: int = 1
    lora: bool = False
    lr: float = 1e-3
    fault: tuple[int, int, int] | None = None
    seams: dict[str, Any] = field(default_factory=dict)
    trl: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    data: Any = None
    max_restarts: int = 2
    timeout_s: float = 240

    def arguments(self, folder: str) -> Any:
        """The TRL config, as a learner gets it."""
        from trainers.trl_arguments import trl_config

        return trl_config(
            self.kind,
            {},
            output_dir=folder,
            max_steps=self.steps,
            learning_rate=self.lr,
            per_device_train_batch_size=self.micro,
            gradient_accumulation_steps=8 // max(1, self.workers) // self.micro,
            save_steps=self.every,
            **backend_arguments(self.settings()),
            **self.trl,
        )

    def settings(self) -> Any:
        """The part of the config that placement reads."""
        return SimpleNamespace(
            learner=SimpleNamespace(
                num_workers=self.workers,
                backend=self.backend,
                timeout_s=self.timeout_s,
                max_restarts=self.max_restarts,
            )
        )


def build(recipe: Recipe, cls: Any, args: Any, **more: Any) -> Any:
    """A trainer of class `cls`, TRL's or ours, on the tiny model."""
    import datasets
    import peft
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(recipe.model)
    transformers.set_seed(args.seed)
    if recipe.kind == "reward_model":
        from trainers.learners import load_scorer

        cfg = SimpleNamespace(dtype="float32", attn_implementation="eager", trust_remote_code=False)
        model = load_scorer(recipe.model, cfg, tokenizer)
    else:
        # eager: torch's fused attention draws its dropout elsewhere
        model = transformers.LlamaForCausalLM.from_pretrained(recipe.model, attn_implementation="eager")
    task = "SEQ_CLS" if recipe.kind == "reward_model" else "CAUSAL_LM"
    adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type=task)
    return cls(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_dict(rows(recipe.kind)) if recipe.data is None else recipe.data,
        processing_class=tokenizer,
        peft_config=adapters if recipe.lora else None,
        callbacks=recipe.callbacks,
        **more,
    )


def make_learner(recipe: Recipe, context: WorkerContext) -> Any:
    """What `run_learner` calls in every process."""
    import torch

    from trainers.learner_mixin import Seams
    from trainers.learners import LEARNERS, quiet

    torch.set_num_threads(1)
    quiet()

    def die(learner: Any, step: int) -> dict[str, Any]:
        if recipe.fault == (context.attempt, step, context.rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    after = {"after_step": die} if recipe.fault else {}
    seams = Seams(stop_after=recipe.stop_after, **after, **recipe.seams)
    return build(
        recipe, LEARNERS[recipe.kind], recipe.arguments(context.scratch), context=context, seams=seams
    )


def train(recipe: Recipe, folder: Path, name: str = "run", make: Any = make_learner) -> Run:
    """Train a new run, or resume the one that is there."""
    cfg = RunConfig(name=name, dir=str(folder), display="off", tensorboard=False)
    there = (folder / name).exists()
    with Run.open(name, folder, cfg) if there else Run.create(cfg, {}, name) as run:
        run.plan(recipe.steps, recipe.steps)
        run_learner(functools.partial(make, recipe), recipe.settings(), run)
    return run


def newest(run: Run) -> dict[str, Any]:
    """The newest checkpoint's tree, without what may differ between equal runs."""
    found = run.latest()
    assert found is not None
    tree = dict(found[1])
    assert tree.pop("attempt") >= 0
    return tree


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two trees differ in any bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [d for key in one for d in differences(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{at}/{i}")
        ]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return [] if same else [at]
    if hasattr(one, "dtype") and hasattr(other, "dtype"):  # bfloat16, which NumPy lacks
        return [] if one.equal(other) else [at]
    return [] if type(one) is type(other) and one == other else [at]


class DoubleLoss(TrainerCallback):
    """A user's callback: adds a number of its own to what is logged."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["double_loss"] = 2 * logs["loss"]
