"""Models and tokenizers: `model=tiny` (see trainers.tiny_model), any Hugging Face id, any folder.

Boundary: names in, local folders and loaded objects out; trains nothing, and importing it loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.errors import UserError, nearest

DTYPES = ("float32", "bfloat16", "float16")
OBJECTIVES = ("next_token", "masked", "any_order")
ATTENTION = ("eager", "sdpa", "flash_attention_2")


@dataclass(kw_only=True)
class ModelConfig:
    """Which model learns. `name`: tiny, a Hugging Face id, or a folder. The `tiny_*` are of model=tiny."""

    name: str = "tiny"
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    peft: dict[str, Any] = field(default_factory=dict)  # of peft.LoraConfig; empty: train every weight
    pad_token: str | None = None  # for tokenizers that lack one
    eos_token: str | None = None
    tiny_layers: int = 2
    tiny_width: int = 128
    tiny_heads: int = 4
    tiny_window: int = 1024  # tokens
    tiny_seed: int = 0
    tiny_objective: str = "next_token"  # next_token | masked | any_order (see trainers.masked_training)
    tiny_completion: int = 32  # tokens of a completion, whose length is fixed unless it is next_token
    tiny_warmup_steps: int = 800  # at most; 0 leaves the weights random
    tiny_warmup_tokens: int = 2_000_000  # at most, prompts and padding included
    tiny_warmup_batch: int = 32
    tiny_warmup_lr: float = 3e-3  # falls to 0 over the steps or tokens
    tiny_warmup_target: float = 0.4  # share of greedy answers that are right, at which the warm-up ends


def check_model_config(cfg: ModelConfig) -> None:
    """Raise UserError for values that cannot work; looks at the disk, never at the network."""
    for name, value, allowed in (
        ("model.dtype", cfg.dtype, DTYPES),
        ("model.attn_implementation", cfg.attn_implementation, ATTENTION),
    ):
        if value not in allowed:
            raise UserError(f"unknown {name}", given=value, allowed=allowed)
    if cfg.name.startswith((".", "/", "~")) and not Path(cfg.name).expanduser().is_dir():
        raise UserError(
            "there is no such model folder",
            given=cfg.name,
            fix="give a folder with config.json, weights and tokenizer",
        )
    if cfg.name != "tiny":
        return
    if min(cfg.tiny_layers, cfg.tiny_width, cfg.tiny_heads) < 1 or cfg.tiny_width % (2 * cfg.tiny_heads):
        raise UserError(
            "a tiny model has at least one layer, and a width that is an even multiple of its heads",
            given=f"tiny_layers={cfg.tiny_layers} tiny_width={cfg.tiny_width} tiny_heads={cfg.tiny_heads}",
            fix="model.tiny_layers=2 model.tiny_width=128 model.tiny_heads=4, for example",
        )
    if cfg.tiny_objective not in OBJECTIVES:
        raise UserError("unknown model.tiny_objective", given=cfg.tiny_objective, allowed=OBJECTIVES)
    if not 0 <= cfg.tiny_warmup_target <= 1:
        raise UserError("model.tiny_warmup_target is a share", given=cfg.tiny_warmup_target, allowed="[0, 1]")
    for name, number, low in (
        ("window", cfg.tiny_window, 2),
        ("completion", cfg.tiny_completion, 1),
        ("warmup_steps", cfg.tiny_warmup_steps, 0),
        ("warmup_tokens", cfg.tiny_warmup_tokens, 1),
        ("warmup_batch", cfg.tiny_warmup_batch, 1),
    ):
        if number < low:
            raise UserError(f"model.tiny_{name} must be at least {low}", given=number)
    if not 0 < cfg.tiny_warmup_lr < float("inf"):
        raise UserError("model.tiny_warmup_lr must be a positive number", given=cfg.tiny_warmup_lr)


def prepare_model(cfg: ModelConfig, task: Any, say: Callable[[str], None] = print) -> Path:
    """A local folder with weights (safetensors) and tokenizer. Raises UserError when there is none."""
    if cfg.name == "tiny":
        from trainers.tiny_model import tiny_model

        return tiny_model(cfg, task, say)
    folder = Path(cfg.name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError("the model folder has no config.json", given=folder)
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(cfg.name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"the model {cfg.name} can't be fetched: {_line(error)}",
            given=f"model.name={cfg.name}",
            allowed="tiny, a Hugging Face id, or a folder",
        ) from error


def load_tokenizer(path: str | Path, cfg: ModelConfig | None = None) -> Any:
    """The tokenizer of a folder, padding on the left, with the config's pad and eos tokens if it names some.

    One that was made here is loaded as what it is: transformers would rebuild it by the model's type.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(path) / "tokenizer_config.json"
    own = settings.is_file() and json.loads(settings.read_text()).get("seedbed_made", False)
    cls = PreTrainedTokenizerFast if own else AutoTokenizer
    try:
        remote = cfg is not None and cfg.trust_remote_code
        tokenizer = cls.from_pretrained(str(path), trust_remote_code=remote)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer can't be loaded: {_line(error)}", given=str(path)) from error
    tokenizer.padding_side = "left"
    for name in ("pad_token", "eos_token"):
        token = getattr(cfg, name, None)
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise UserError(
                f"the tokenizer does not know this model.{name}",
                given=token,
                allowed=tokenizer.all_special_tokens or nearest(token, tokenizer.get_vocab()),
            )
        setattr(tokenizer, name, token)
    return tokenizer


def load_model(path: str | Path, cfg: ModelConfig) -> Any:
    """The causal language model of a folder, with the config's dtype and attention."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=cfg.dtype,
            attn_implementation=cfg.attn_implementation,
            trust_remote_code=cfg.trust_remote_code,
            use_safetensors=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"the model can't be loaded: {_line(error)}", given=str(path)) from error


def _line(error: Exception) -> str:
    """What went wrong, in one line."""
    return next(iter(str(error).splitlines()), type(error).__name__)
