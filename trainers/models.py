"""Models and tokenizers: `model=tiny` made here, or any Hugging Face id or folder. Trains only the tiny one.

The tiny model is a Llama of a fraction of a million parameters over the words of a task, warmed up on the
task's demonstrations and kept in a cache under the hash of everything that determines it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envs.errors import UserError, nearest

FORMAT = 1  # of the cached folders; raise it when the recipe below changes
SPECIAL = ("<pad>", "<eos>", "<unk>")
DTYPES = ("float32", "bfloat16", "float16")
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
    tiny_window: int = 256  # tokens
    tiny_seed: int = 0
    tiny_warmup_steps: int = 400  # at most; 0 leaves the weights random
    tiny_warmup_batch: int = 32
    tiny_warmup_lr: float = 2e-3
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
    if cfg.tiny_width % cfg.tiny_heads or min(cfg.tiny_layers, cfg.tiny_width, cfg.tiny_heads) < 1:
        raise UserError(
            "a tiny model's width must be a multiple of its heads",
            given=f"model.tiny_width={cfg.tiny_width}, model.tiny_heads={cfg.tiny_heads}",
        )
    if not 0 <= cfg.tiny_warmup_target <= 1:
        raise UserError("model.tiny_warmup_target is a share", given=cfg.tiny_warmup_target, allowed="[0, 1]")
    if cfg.tiny_warmup_steps < 0 or cfg.tiny_warmup_batch < 1:
        raise UserError(
            "a warm-up has at least 0 steps of at least 1 demonstration",
            given=f"{cfg.tiny_warmup_steps} steps of {cfg.tiny_warmup_batch}",
        )


def prepare_model(cfg: ModelConfig, task: Any, say: Callable[[str], None] = print) -> Path:
    """A local folder with weights (safetensors) and tokenizer. Raises UserError when there is none."""
    if cfg.name == "tiny":
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
            f"the model {cfg.name} can't be fetched: {str(error).splitlines()[0]}",
            given=f"model.name={cfg.name}",
            allowed="tiny, a Hugging Face id, or a folder",
        ) from error


def load_tokenizer(path: str | Path, cfg: ModelConfig | None = None) -> Any:
    """The tokenizer of a folder, padding on the left, with the config's pad and eos tokens if it names some.

    One that was made here is loaded as what it is: transformers would rebuild it by the model's type.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(path) / "tokenizer_config.json"
    own = settings.is_file() and json.loads(settings.read_text()).get("seedbed_words", False)
    cls = PreTrainedTokenizerFast if own else AutoTokenizer
    try:
        tokenizer = cls.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer can't be loaded: {str(error).splitlines()[0]}", given=str(path)
        ) from error
    tokenizer.padding_side = "left"
    for name in ("pad_token", "eos_token"):
        token = getattr(cfg, name, None)
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise UserError(
                f"the tokenizer does not know this model.{name}",
                given=token,
                allowed=nearest(token, tokenizer.get_vocab()),
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
        raise UserError(
            f"the model can't be loaded: {str(error).splitlines()[0]}", given=str(path)
        ) from error


# --- the tiny model


def cache_folder() -> Path:
    """Where made models are kept: $SEEDBED_CACHE, else $XDG_CACHE_HOME/seedbed, else ~/.cache/seedbed."""
    if place := os.environ.get("SEEDBED_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedbed"


def tiny_key(cfg: ModelConfig, task: Any) -> str:
    """Hash of what determines a tiny model: recipe, sizes, vocabulary, demonstrations, libraries."""
    import torch
    import transformers

    shown = [(task.train(i).text, task.demonstration(i)) for i in range(8)]
    settings = {k: v for k, v in asdict(cfg).items() if k.startswith("tiny_")}
    facts = [FORMAT, settings, task.vocabulary(), shown, torch.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def tiny_model(cfg: ModelConfig, task: Any, say: Callable[[str], None]) -> Path:
    """The cached folder, made first if it is not there or not whole."""
    words = task.vocabulary()
    if words is None:
        raise UserError(
            "model=tiny speaks the words of a task, and this task's are not known",
            given=getattr(task, "name", task),
            fix="choose a Hugging Face model with model.name=<id or folder>",
        )
    folder = cache_folder() / "models" / f"tiny-{tiny_key(cfg, task)}"
    if _whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"the cache of made models can't be written: {error}",
            given=str(folder.parent),
            fix="set SEEDBED_CACHE to a folder that you may write to",
        ) from error
    try:
        _make(cfg, task, words, aside, say)
        (aside / "whole.json").write_text(json.dumps(_sizes(aside)))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            aside.rename(folder)
        except OSError:  # another process made the same one meanwhile
            if not _whole(folder):
                raise
        return folder
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.iterdir())
        if p.name != "whole.json"
    }


def _whole(folder: Path) -> bool:
    """Whether a cached folder is what was written."""
    try:
        return json.loads((folder / "whole.json").read_text()) == _sizes(folder)
    except (OSError, ValueError):
        return False


def word_tokenizer(words: list[str]) -> Any:
    """One token a word, words apart by blanks; decoding gives the text back."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        seedbed_words=True,
    )


def _make(cfg: ModelConfig, task: Any, words: list[str], folder: Path, say: Callable[[str], None]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    tokenizer = word_tokenizer(words)
    torch.manual_seed(cfg.tiny_seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=cfg.tiny_width,
            intermediate_size=2 * cfg.tiny_width,
            num_hidden_layers=cfg.tiny_layers,
            num_attention_heads=cfg.tiny_heads,
            num_key_value_heads=cfg.tiny_heads,
            max_position_embeddings=cfg.tiny_window,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    if cfg.tiny_warmup_steps and task.demonstration(0) is not None:
        _warm_up(cfg, task, tokenizer, model, say)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _warm_up(cfg: ModelConfig, task: Any, tokenizer: Any, model: Any, say: Callable[[str], None]) -> None:
    """Next-token loss on demonstrations until the greedy answers reach the target share."""
    import torch

    from trainers.fit import fit

    def batch(step: int) -> tuple[Any, Any]:
        first = step * cfg.tiny_warmup_batch
        rows = []
        for i in range(first, first + cfg.tiny_warmup_batch):
            index = i if task.train_size is None else i % task.train_size
            prompt = tokenizer(task.train(index).text)["input_ids"]
            answer = [*tokenizer(task.demonstration(index))["input_ids"], tokenizer.eos_token_id]
            rows.append((prompt, answer))
        longest = max(len(p) + len(a) for p, a in rows)
        ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
        labels = torch.full_like(ids, -100)
        for i, (p, a) in enumerate(rows):
            ids[i, : len(p) + len(a)] = torch.tensor(p + a)
            labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
        return ids, labels

    def loss(module: Any, rows: tuple[Any, Any]) -> Any:
        logits = module(input_ids=rows[0]).logits[:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[1][:, 1:].flatten(), ignore_index=-100
        )

    every, seen = 25, [0.0]

    def good_enough(step: int, value: float) -> bool:
        if step % every:
            return False
        seen[0] = greedy_accuracy(model, tokenizer, task, 64)
        say(
            f"warm-up of the tiny model: step {step}, loss {value:.3f}, {seen[0]:.0%} of greedy answers right"
        )
        return seen[0] >= cfg.tiny_warmup_target

    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.tiny_warmup_lr, weight_decay=0.01)
    fit(
        model,
        batch,
        loss,
        optimizer,
        steps=cfg.tiny_warmup_steps,
        schedule=lambda step: min(1.0, (step + 1) / 20),
        until=good_enough,
    )


def greedy_accuracy(model: Any, tokenizer: Any, task: Any, count: int) -> float:
    """Mean check of the greedy answers to `count` training prompts: the last ones, or of a late region."""
    import torch

    first = 1_000_000 if task.train_size is None else max(0, task.train_size - count)
    prompts = [task.train(first + i) for i in range(min(count, task.train_size or count))]
    rows = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True)
    room = model.config.max_position_embeddings - rows["input_ids"].shape[1]
    longest = max(len(tokenizer(task.demonstration(i))["input_ids"]) for i in range(16)) + 8
    model.eval()
    with torch.no_grad():
        out = model.generate(
            input_ids=rows["input_ids"],
            attention_mask=rows["attention_mask"],
            max_new_tokens=min(room, longest),
            do_sample=False,
        )
    model.train()
    texts = tokenizer.batch_decode(out[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(task.check(p.meta, text) for p, text in zip(prompts, texts)) / len(prompts)
