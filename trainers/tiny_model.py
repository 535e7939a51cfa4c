"""`model=tiny`: a Llama of a fraction of a million parameters, made here. Knows tasks, no algorithm.

With `tiny_objective=masked` or `any_order` it is a masked language model. It speaks the words of a task
(bytes, where texts are open), is warmed up on the task's demonstrations, and is kept in a cache under the
hash of everything that determines it.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from envs.errors import UserError
from trainers.feed_batch import encode
from trainers.fit import fit

if TYPE_CHECKING:
    from trainers.models import ModelConfig

FORMAT = 2  # of the cached folders; raise it when the recipe below changes
SPECIAL = ("<pad>", "<eos>", "<unk>")
MASK = "<mask>"
MANIFEST = "whole.json"
WAIT_S = 1800.0  # for another process that makes the same model
EVERY, PROMPTS = 20, 128  # warm-up steps between two looks at the accuracy, and prompts of a look
CHAT = (
    r"{% for m in messages %}{{ '' if loop.first else '\n' }}{{ m['role'] }}: {{ m['content'] }}"
    r"{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
)

Say = Callable[[str], None]


def tiny_model(cfg: ModelConfig, task: Any, say: Say) -> Path:
    """The folder in the cache, made first if it is not there or not whole.

    Processes that want the same model at once make it once. Raises UserError for a cache that can't be
    written, and for texts that are longer than the window.
    """
    folder = cache_folder() / "models" / f"tiny-{tiny_key(cfg, task)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f"{folder.name}.lock"), say):
            facts = read_manifest(folder)
            if facts is None:
                if folder.exists():
                    say(f"the tiny model in {folder} is damaged: it is made anew")
                facts = _make_folder(cfg, task, folder, say)
    except OSError as error:
        raise UserError(
            f"the cache of made models can't be used: {error}",
            given=str(folder.parent),
            fix="set SEEDBED_CACHE to a folder that you may write to",
        ) from error
    right = "" if facts["accuracy"] is None else f", {facts['accuracy']:.0%} of greedy answers right"
    say(f"tiny model: {facts['parameters'] / 1e6:.2f}M parameters, {facts['steps']} warm-up steps{right}")
    return folder


# --- the cache


def cache_folder() -> Path:
    """Where made models are kept: $SEEDBED_CACHE, else $XDG_CACHE_HOME/seedbed, else ~/.cache/seedbed."""
    if place := os.environ.get("SEEDBED_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedbed"


def tiny_key(cfg: ModelConfig, task: Any) -> str:
    """Hash of what determines a tiny model: recipe, sizes, task, words, demonstrations, libraries."""
    settings = {name: value for name, value in asdict(cfg).items() if name.startswith("tiny_")}
    prompts = [task.train(i) for i in range(min(8, task.train_size or 8))]
    shown = [(p.text, p.messages, task.demonstration(i)) for i, p in enumerate(prompts)]
    about = {name: value for name, value in asdict(task.cfg).items() if name not in ("id", "eval_size")}
    versions = (torch.__version__, transformers.__version__)
    facts = [FORMAT, settings, about, task.vocabulary(), shown, versions]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What is known of a cached model: steps, accuracy, parameters; None unless every file is as written."""
    try:
        facts: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return facts if facts["files"] == _hashes(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hashes(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.iterdir()) if file.name != MANIFEST]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _make_folder(cfg: ModelConfig, task: Any, folder: Path, say: Say) -> dict[str, Any]:
    """Make the model aside and put it in its place; what a killed process left goes."""
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        facts = _make(cfg, task, aside, say)
        facts["files"] = _hashes(aside)
        (aside / MANIFEST).write_text(json.dumps(facts))
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return facts


@contextmanager
def _alone(place: Path, say: Say) -> Iterator[None]:
    """Hold the lock file `place`. The kernel frees it when its holder dies."""
    with place.open("a") as file:
        end, told = time.monotonic() + WAIT_S, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say("another process is making the same tiny model: waiting for it")
                told = True
            if time.monotonic() > end:
                raise UserError(
                    f"another process has been making the same tiny model for {WAIT_S:g} s",
                    given=str(place),
                    fix="end that process; its lock goes with it",
                )
            time.sleep(0.1)
        yield


# --- tokenizers


def word_tokenizer(words: list[str], masked: bool = False) -> Any:
    """One token a word, words apart by single blanks; decoding gives the text back."""
    special = [*SPECIAL, MASK] if masked else SPECIAL
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*special, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(tokenizer, **_mask_setting(masked))


def byte_tokenizer(masked: bool = False) -> Any:
    """One token a byte of UTF-8, for any text, and a plain chat template; decoding gives the text back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*SPECIAL, MASK] if masked else SPECIAL
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer, chat_template=CHAT, **_mask_setting(masked))


def _mask_setting(masked: bool) -> dict[str, str]:
    return {"mask_token": MASK} if masked else {}


def _fast(tokenizer: Tokenizer, **settings: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        seedbed_made=True,
        **settings,
    )


# --- the model


def _make(cfg: ModelConfig, task: Any, folder: Path, say: Say) -> dict[str, Any]:
    """Build, warm up and save. Leaves the process's generators and threads as they were."""
    words = task.vocabulary()
    masked = cfg.tiny_objective != "next_token"
    tokenizer = byte_tokenizer(masked) if words is None else word_tokenizer(words, masked)
    threads = torch.get_num_threads()
    # The same weights however many threads a process has.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.tiny_seed)
            model = _llama(cfg, tokenizer)
            steps, accuracy = _warm_up(cfg, task, tokenizer, model, say)
    finally:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    return {"task": task.cfg.task, "steps": steps, "accuracy": accuracy, "parameters": parameters}


def _llama(cfg: ModelConfig, tokenizer: Any) -> Any:
    masked = {} if cfg.tiny_objective == "next_token" else {"mask_token_id": tokenizer.mask_token_id}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
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
            **masked,
        )
    )


def _warm_up(cfg: ModelConfig, task: Any, tokenizer: Any, model: Any, say: Say) -> tuple[int, float | None]:
    """(steps taken, accuracy): the objective's loss on demonstrations until the accuracy reaches the target.

    The learning rate falls linearly to 0 over the allowed steps or tokens, whichever end first.
    """
    few = range(min(64, task.train_size or 64))
    if not cfg.tiny_warmup_steps or all(task.demonstration(i) is None for i in few):
        return 0, None
    tokens, accuracy, masked = [0], [0.0], cfg.tiny_objective != "next_token"

    def batches() -> Iterator[list[tuple[list[int], list[int]]]]:
        rows = _demonstrations(task, tokenizer, cfg.tiny_window)
        while True:
            some = list(itertools.islice(rows, cfg.tiny_warmup_batch))
            fixed = max(len(p) for p, _ in some) + cfg.tiny_completion
            longest = fixed if masked else max(len(p) + len(a) for p, a in some)
            tokens[0] += len(some) * longest
            yield some

    def rate(step: int) -> float:
        spent = max(step / cfg.tiny_warmup_steps, tokens[0] / cfg.tiny_warmup_tokens)
        return min(1.0, (step + 1) / 20) * max(0.0, 1 - spent)

    def loss(module: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
        if masked:
            return _masked_loss(cfg, tokenizer, module, rows)
        ids, labels = _padded(rows, tokenizer.pad_token_id)
        logits = module(input_ids=ids).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)

    def over(step: int, value: float) -> bool:
        last = step == cfg.tiny_warmup_steps or tokens[0] >= cfg.tiny_warmup_tokens
        if step % EVERY and not last:
            return False
        accuracy[0] = greedy_accuracy(model, tokenizer, task, PROMPTS, _writer(cfg, tokenizer))
        say(f"warm-up: step {step}, loss {value:.3f}, {accuracy[0]:.0%} of greedy answers right")
        return last or accuracy[0] >= cfg.tiny_warmup_target

    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.tiny_warmup_lr, weight_decay=0.01)
    done = fit(
        model, batches(), loss, optimizer, steps=cfg.tiny_warmup_steps, schedule=rate, until=over
    )  # fmt: skip
    return done.step, accuracy[0]


def _demonstrations(task: Any, tokenizer: Any, window: int) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, completion with its end token) of one demonstration after another, for ever."""
    for i in itertools.count():
        index = i if task.train_size is None else i % task.train_size
        shown = task.demonstration(index)
        if shown is None:
            continue
        prompt = encode(tokenizer, task.train(index))
        answer = [*tokenizer(shown, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(prompt) + len(answer) > window:
            raise UserError(
                "a demonstration is longer than the tiny model's window",
                given=f"prompt {index}: {len(prompt)} + {len(answer)} tokens, model.tiny_window={window}",
                fix=f"model.tiny_window={2 ** (len(prompt) + len(answer) - 1).bit_length()}",
            )
        yield prompt, answer


def _padded(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both (B, T): prompts have no labels (-100); padded on the right."""
    ids = torch.full((len(rows), max(len(p) + len(a) for p, a in rows)), pad)
    labels = torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(rows):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def _masked_loss(
    cfg: ModelConfig, tokenizer: Any, model: Any, rows: list[tuple[list[int], list[int]]]
) -> torch.Tensor:
    """The masked objectives' loss on (prompt, answer) pairs."""
    from trainers.masked_training import any_order_loss, fixed_rows, masked_loss

    special = {"pad": tokenizer.pad_token_id, "end": tokenizer.eos_token_id}
    fixed = fixed_rows([p for p, _ in rows], [a for _, a in rows], cfg.tiny_completion, **special)
    kind = masked_loss if cfg.tiny_objective == "masked" else any_order_loss
    return kind(model, fixed, tokenizer.mask_token_id)[0]


Writer = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def _writer(cfg: ModelConfig, tokenizer: Any) -> Writer | None:
    """(model, prompt ids, mask (B, P)) -> greedy completions (B, L) of a masked model; else None."""
    if cfg.tiny_objective == "next_token":
        return None
    from rollouts.decoding import Decoding
    from rollouts.masked_diffusion import decode

    how = Decoding(any_order=cfg.tiny_objective == "any_order")

    def write(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        noise = [np.random.default_rng(0)] * len(ids)
        settings: dict[str, Any] = {"length": cfg.tiny_completion, "decoding": how, "temperature": 0.0}
        return decode(model, ids, mask, generators=noise, **settings).ids

    return write


def greedy_accuracy(model: Any, tokenizer: Any, task: Any, count: int, write: Writer | None = None) -> float:
    """Mean check of the greedy answers to `count` training prompts: the last ones, or of a late region.

    Where a check may not be trusted, right is what equals the demonstration. write: how answers are written;
    None: token by token.
    """
    first = 1_000_000 if task.train_size is None else max(0, task.train_size - count)
    prompts = [(i, task.train(i)) for i in range(first, first + min(count, task.train_size or count))]
    ids = [encode(tokenizer, prompt) for _, prompt in prompts]
    shown = [task.demonstration(i) or "" for i in range(min(16, task.train_size or 16))]
    longest = max(len(tokenizer(text)["input_ids"]) for text in shown) + 8
    width = max(map(len, ids))
    rows = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids])
    there = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    new = max(1, min(model.config.max_position_embeddings - width, longest))
    model.eval()
    with torch.no_grad():
        if write is None:
            out = model.generate(input_ids=rows, attention_mask=there, max_new_tokens=new, do_sample=False)
            answers = out[:, width:].tolist()
        else:
            answers = write(model, rows, there).tolist()
    model.train()
    end = tokenizer.eos_token_id
    answers = [ids[: ids.index(end)] if end in ids else ids for ids in answers]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = 0.0
    for (i, prompt), text in zip(prompts, texts):
        right += text == task.demonstration(i) if task.untrusted_check else task.check(prompt.meta, text)
    return right / len(prompts)
