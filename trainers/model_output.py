"""What a run leaves: a folder that plain transformers and vLLM load. Trains nothing.

model/            weights (safetensors), config, tokenizer, README.md (the card); adapters merged in
model/adapter/    the adapters alone, where only those were trained
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError

from envs.errors import UserError
from trainers import learner_state
from trainers.checkpoint import Tree, write_error
from trainers.learners import load_scorer, lora, quiet

if TYPE_CHECKING:
    from collections.abc import Mapping

MAKE_ROOM = "make room or restore access there, then resume the run"


def export_model(
    kind: str, cfg: Any, model_path: str, tree: Tree, folder: Path, facts: Mapping[str, Any]
) -> Path:
    """Write the model of a learner's checkpoint `tree` to `folder`, whole or not at all.

    model_path: what the run started from; facts: lines of the card, by name. Raises UserError when the disk
    refuses or the tree is not of this model.
    """
    from trainers.models import load_model, load_tokenizer

    quiet()
    tokenizer = load_tokenizer(model_path, cfg.model)
    if kind == "reward_model":
        model = load_scorer(model_path, cfg.model, tokenizer)
    else:
        model = load_model(model_path, cfg.model)
    config = lora(cfg, kind)
    aside = folder.with_name(f".tmp-{folder.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        if config is not None:
            import peft

            model = peft.get_peft_model(model, config)
        learner_state.load_model_state(model, tree["model"])
        if config is not None:
            model.save_pretrained(aside / "adapter")
            model = model.merge_and_unload()
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        (aside / "README.md").write_text(card(kind, facts), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise write_error(error, "the trained model", folder, MAKE_ROOM) from error
    except SafetensorError as error:  # hides the OSError in its text
        raise UserError(
            f"Cannot write the trained model: {error}.", given=str(folder), fix=MAKE_ROOM
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def card(kind: str, facts: Mapping[str, Any]) -> str:
    """A model card in the hub's format: what trained the model, from what, with which result."""
    task = "text-classification" if kind == "reward_model" else "text-generation"
    head = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", "- seedbed", f"- {kind}"]
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    use = (
        "AutoModelForSequenceClassification" if kind == "reward_model" else "AutoModelForCausalLM"
    ) + ".from_pretrained(<this folder>)"
    lines = [
        *head, "---", "", f"# {facts.get('run', kind)}", "", "Trained by seedbed; not evaluated for any use.",
        "", "| | |", "| --- | --- |", *rows, "", f"`transformers {transformers.__version__}`: `{use}`", "",
    ]  # fmt: skip
    return "\n".join(lines)
