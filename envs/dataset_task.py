"""Datasets as a text task: prompts and reference answers of a file or of the hub. Trains nothing.

Columns: prompt (text, or a list of chat messages), answer, completion (a demonstration); others go along as
meta, for reward functions. env.columns={prompt: <its name there>, ...} renames.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from envs.errors import UserError
from envs.text_tasks import EVAL_SIZE, Prompt, TextTask, TextTaskConfig, check_index, read_options

FILES = (".jsonl", ".json", ".parquet")
FINAL = (r"<answer>(.*?)</answer>", r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", r"####(.*)")


@dataclass(kw_only=True)
class Options:
    """split, eval_split, name (of a configuration): of a dataset on the hub. eval_split may be a second file.

    Without eval_split some prompts of the one split are held out.
    """

    split: str = "train"
    eval_split: str | None = None
    name: str | None = None


class DatasetTask(TextTask):
    """See the module. Right: the final answers of completion and reference are equal, as numbers or words.

    The final answer is the last <answer>...</answer>, \\boxed{...} or #### ..., else the whole text. A
    prompt that occurs twice is in one split only.
    """

    def __init__(self, cfg: TextTaskConfig) -> None:
        check_dataset_config(cfg)
        self.cfg = cfg
        options: Options = read_options(Options, cfg.options)
        rows = self._rows(options.split)
        keys = [_key(row) for row in rows]
        if options.eval_split:
            held_out = self._rows(options.eval_split)
        else:
            order = sorted(dict.fromkeys(keys), key=lambda key: _hash(f"{cfg.seed}/{key}"))
            count = cfg.eval_size or min(EVAL_SIZE, len(order) // 10 or 1)
            if len(order) <= count:
                raise UserError("no prompt is left to train on", given=f"{len(order)} different prompts",
                                allowed=f"more than {count}", fix="lower env.eval_size")  # fmt: skip
            chosen = set(order[:count])
            first = {key: row for key, row in zip(reversed(keys), reversed(rows)) if key in chosen}
            held_out = [first[key] for key in order[:count]]
        apart = {_key(row) for row in held_out}
        self._train = [row for row, key in zip(rows, keys) if key not in apart][: cfg.train_size]
        self._eval = list(held_out)[: cfg.eval_size]
        self.train_size, self.eval_size = len(self._train), len(self._eval)

    def _rows(self, split: str) -> Sequence[dict[str, Any]]:
        options: Options = read_options(Options, self.cfg.options)
        own = split.endswith(FILES)
        rows = read_rows(split if own else str(self.cfg.path), split, options.name)
        new = {old: new for new, old in self.cfg.columns.items()}
        return [{new.get(name, name): value for name, value in row.items()} for row in rows]

    def train(self, index: int) -> Prompt:
        """See `TextTask`."""
        check_index(index, self.train_size)
        return self._prompt("train", index, self._train[index])

    def eval(self, index: int) -> Prompt:
        """See `TextTask`."""
        check_index(index, self.eval_size)
        return self._prompt("eval", index, self._eval[index])

    def _prompt(self, split: str, index: int, row: dict[str, Any]) -> Prompt:
        prompt = self._column(row, "prompt")
        meta = {name: value for name, value in row.items() if name != "prompt" and _is_json(value)}
        if isinstance(prompt, str):
            return Prompt(id=f"{split}-{index}", text=prompt, meta=meta)
        return Prompt(id=f"{split}-{index}", messages=list(prompt), meta={**meta, "conversational": True})

    def demonstration(self, index: int) -> str | None:
        """See `TextTask`: the column completion, else answer."""
        check_index(index, self.train_size)
        row = self._train[index]
        shown = row.get("completion", row.get("answer"))
        if isinstance(shown, list) and shown and isinstance(shown[-1], dict):
            shown = shown[-1].get("content")
        return None if shown is None else str(shown)

    def check(self, meta: dict[str, Any], completion: str) -> float:
        """See `TextTask`."""
        return float(final_answer(completion) == final_answer(str(self._column(meta, "answer"))))

    def _column(self, row: dict[str, Any], name: str) -> Any:
        if row.get(name) is None:
            raise UserError(
                f"the dataset has no column '{name}'" if name not in row else f"a row's '{name}' is empty",
                given=f"columns {sorted(row)}",
                fix=f"set env.columns={{{name}: <its name there>}}",
            )
        return row[name]


def check_dataset_config(cfg: TextTaskConfig) -> None:
    """Raise UserError without a path, or for a file that is not there."""
    read_options(Options, cfg.options)
    if not cfg.path:
        raise UserError(
            "env=dataset needs env.path",
            allowed=f"a file ({', '.join(FILES)}), a folder of save_to_disk, or a name on the hub",
        )
    if cfg.path.endswith(FILES) and not Path(cfg.path).is_file():
        raise UserError("there is no such dataset file", given=cfg.path)


def read_rows(path: str, split: str = "train", name: str | None = None) -> Sequence[dict[str, Any]]:
    """The rows of a .jsonl, .json or .parquet file, a folder of `save_to_disk`, or a name on the hub."""
    place = Path(path)
    try:
        if place.suffix == ".jsonl":
            with place.open(encoding="utf-8") as file:
                rows: Any = [json.loads(line) for line in file if line.strip()]
        elif place.suffix == ".json":
            rows = json.loads(place.read_text(encoding="utf-8"))
        elif place.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            import datasets

            if place.is_dir():
                found = datasets.load_from_disk(path)
                rows = found[split] if isinstance(found, datasets.DatasetDict) else found
            else:
                rows = datasets.load_dataset(path, name, split=split)
    except Exception as error:  # each reader has errors of its own
        raise UserError(f"the dataset can't be read: {str(error).splitlines()[0]}", given=path) from error
    if not len(rows) or not isinstance(rows[0], dict):
        raise UserError("the dataset has no rows, or rows without column names", given=path)
    return rows


def final_answer(text: str) -> str | Fraction:
    """The final answer of a text, as a number if it is one, else in lower case with single blanks."""
    for pattern in FINAL:
        if found := re.findall(pattern, text, re.DOTALL if "<" in pattern else 0):
            text = found[-1]
            break
    words = " ".join(text.lower().split())
    number = words.replace(",", "").removeprefix("$").removesuffix(".")
    if re.fullmatch(r"-?(\d{1,100}(\.\d{0,100})?|\.\d{1,100}|\d{1,100}/\d{1,100})", number):
        try:
            return Fraction(number)
        except (ValueError, ZeroDivisionError):
            pass
    return words


def _key(row: dict[str, Any]) -> str:
    return json.dumps(row.get("prompt", row), sort_keys=True, default=str)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
