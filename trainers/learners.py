"""Learners on TRL's own trainers: SFT, DPO, reward models, pre-training. The policy's is `trainers.policy`.

The losses are TRL's, untouched; `trainers.learner_mixin` gives each one its reports, checkpoints and seams.
A `LearnerMaker` is what `trainers.placement` calls in every process. Importing this module loads TRL.
"""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import transformers
import trl

from envs.errors import UserError, nearest
from trainers.learner_mixin import SeamMixin, Seams
from trainers.placement import WorkerContext, backend_arguments
from trainers.rows import training_rows
from trainers.trl_arguments import loss_settings, trl_config


class SFTLearner(SeamMixin, trl.SFTTrainer):
    """Cross-entropy on demonstrations, over completion tokens where prompts are apart, else over all."""


class PretrainLearner(SeamMixin, trl.SFTTrainer):
    """Cross-entropy on every token of running text."""


class DPOLearner(SeamMixin, trl.DPOTrainer):
    """Direct preference optimisation (Rafailov et al. 2023) against the model it starts from."""


class RewardModelLearner(SeamMixin, trl.RewardTrainer):
    """A scalar head trained so that chosen completions score above rejected ones (Bradley-Terry)."""


LEARNERS: dict[str, Any] = {
    "sft": SFTLearner,
    "pretrain": PretrainLearner,
    "dpo": DPOLearner,
    "reward_model": RewardModelLearner,
}


@dataclass(kw_only=True)
class LearnerMaker:
    """Makes the learner of `kind` in a worker: called with its context, picklable.

    model_path: a local folder with weights and tokenizer; task: a TextTask or None; rows: a dataset to use
    instead of what the config names; callbacks: transformers' TrainerCallback objects or classes.
    """

    kind: str
    cfg: Any
    model_path: str
    task: Any = None
    rows: datasets.Dataset | None = None
    callbacks: Sequence[Any] = ()

    def __call__(self, context: WorkerContext) -> Any:
        from trainers.language import learning_rate
        from trainers.models import load_tokenizer

        quiet()
        cfg, world = self.cfg, context.world_size
        tokenizer = load_tokenizer(self.model_path, cfg.model)
        check_tokens(tokenizer, self.model_path)
        rows = self.rows
        if rows is None:
            rows = training_rows(self.kind, cfg, self.task, tokenizer, context.scratch)
        args = trl_config(
            self.kind,
            cfg.learner.trl,
            output_dir=context.scratch,
            max_steps=cfg.learner.steps,
            max_grad_norm=cfg.learner.max_grad_norm,
            per_device_train_batch_size=cfg.learner.samples_per_device_batch,
            gradient_accumulation_steps=cfg.learner.samples_per_step
            // (world * cfg.learner.samples_per_device_batch),
            seed=cfg.run.seed,
            save_steps=cfg.run.checkpoint_every,
            gradient_checkpointing=cfg.model.gradient_checkpointing,
            **learning_rate(cfg),
            **backend_arguments(cfg),
            **loss_settings(self.kind, cfg.learner),
        )
        transformers.set_seed(cfg.run.seed)  # before the weights that are drawn anew: heads, adapters
        cls = LEARNERS[self.kind]
        try:
            return cls(
                model=self._model(tokenizer),
                args=args,
                train_dataset=rows,
                processing_class=tokenizer,
                peft_config=lora(cfg, self.kind),
                callbacks=[*self.callbacks, *named_callbacks(cfg.learner.callbacks)],
                context=context,
                seams=seams_of(cfg, tokenizer),
            )
        except UserError:
            raise
        except ValueError as error:  # how TRL refuses settings that do not go together
            raise UserError(f"TRL's {cls.__mro__[2].__name__} refuses its settings: {error}") from error

    def _model(self, tokenizer: Any) -> Any:
        from trainers.models import load_model

        if self.kind != "reward_model":
            return load_model(self.model_path, self.cfg.model)
        return load_scorer(self.model_path, self.cfg.model, tokenizer)


def check_learner(kind: str, cfg: Any) -> None:
    """Raise UserError for what only TRL, peft or an import can tell; needs no model."""
    with tempfile.TemporaryDirectory() as folder:
        trl_config(kind, cfg.learner.trl, output_dir=folder, **loss_settings(kind, cfg.learner))
    lora(cfg, kind)
    named_callbacks(cfg.learner.callbacks)


def seams_of(cfg: Any, tokenizer: Any) -> Seams:
    """What the run's algorithm puts into a learner's step. Raises UserError for a seam that TRL lacks."""
    algorithm = cfg.algorithm(cfg.algo, cfg.run.seed)
    algorithm.prepare(cfg, tokenizer)
    names = ("loss", "token_weight", "compose", "aggregate", "after_step", "state_dict", "load_state_dict")
    filled = {name: getattr(algorithm, name, None) for name in names}
    return Seams(stop_after=cfg.run.max_steps, **filled)


def load_scorer(path: str, cfg: Any, tokenizer: Any) -> Any:
    """The model of a folder with one output, the reward, read off the last token that is not padding."""
    try:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            dtype=cfg.dtype,
            attn_implementation=cfg.attn_implementation,
            trust_remote_code=cfg.trust_remote_code,
            use_safetensors=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"the model can't be loaded with a scalar head: {str(error).splitlines()[0]}", given=path
        ) from error
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def check_tokens(tokenizer: Any, where: str) -> None:
    """Raise UserError for a tokenizer that cannot end or pad a sequence."""
    for name, use in (("eos", "end a completion"), ("pad", "fill up a batch")):
        if getattr(tokenizer, f"{name}_token_id") is None:
            have = [
                t for t in (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) if t is not None
            ]
            raise UserError(
                f"the tokenizer has no {name} token, so it cannot {use}",
                given=where,
                allowed=f"a tokenizer with pad and eos tokens; it has {have or 'no special tokens'}",
                fix=f"set model.{name}_token=<a token of its vocabulary>",
            )


def lora(cfg: Any, kind: str) -> Any:
    """peft's LoraConfig of `model.peft`; None without one. Raises UserError for settings it refuses."""
    if not cfg.model.peft:
        return None
    import peft

    known = [field.name for field in dataclasses.fields(peft.LoraConfig)]
    for name in cfg.model.peft:
        if name not in known:
            raise UserError(
                f"peft's LoraConfig has no argument {name!r}",
                given=f"model.peft.{name}={cfg.model.peft[name]}",
                allowed=nearest(name, known),
            )
    task = "SEQ_CLS" if kind == "reward_model" else "CAUSAL_LM"
    try:
        return peft.LoraConfig(task_type=task, **dict(cfg.model.peft))
    except (TypeError, ValueError) as error:
        raise UserError(f"peft refuses model.peft: {error}", given=dict(cfg.model.peft)) from error


def named_callbacks(paths: Sequence[str]) -> list[Any]:
    """transformers' callback classes by `package.module.Class`. Raises UserError for what is none."""
    found = []
    for path in paths:
        module, _, name = path.replace(":", ".").rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"the callback {path} can't be loaded: {error}", allowed="package.module.Class"
            ) from error
        if not (isinstance(cls, type) and issubclass(cls, transformers.TrainerCallback)):
            raise UserError(
                f"{path} is not a callback", given=cls, allowed="a subclass of transformers.TrainerCallback"
            )
        found.append(cls)
    return found


def quiet() -> None:
    """The run reports; the libraries' own bars and tables would say it twice."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
