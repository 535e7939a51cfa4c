"""Rows to learn from: a text task's demonstrations, or a dataset with TRL's columns. Trains nothing.

sft           prompt, completion           (or messages, or text, or input_ids)
pretrain      text                         (or input_ids)
dpo           prompt, chosen, rejected     (or chosen and rejected that share their beginning)
reward_model  prompt, chosen, rejected     (or chosen and rejected)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.errors import UserError

if TYPE_CHECKING:
    import datasets

# Any of these sets of columns will do.
COLUMNS: dict[str, list[set[str]]] = {
    "sft": [{"prompt", "completion"}, {"messages"}, {"conversations"}, {"text"}, {"input_ids"}],
    "pretrain": [{"text"}, {"input_ids"}],
    "dpo": [{"prompt", "chosen", "rejected"}, {"chosen", "rejected"}],
    "reward_model": [
        {"prompt", "chosen", "rejected"},
        {"chosen", "rejected"},
        {"chosen_ids", "rejected_ids"},
    ],
    "policy": [{"prompt"}],
}
MAX_ROWS = 100_000  # of a task that can make more than that
TRIES = 50  # other prompts to look at for a completion that is wrong here


def training_rows(kind: str, cfg: Any, task: Any, tokenizer: Any, scratch: str) -> datasets.Dataset:
    """The dataset that a learner of `kind` trains on. Raises UserError when it is empty or lacks columns.

    `cfg.env.path` names a dataset (see `read_dataset`); without one the rows are the task's own.
    """
    import datasets

    if path := getattr(cfg.env, "path", None):
        rows = read_dataset(path, scratch)
        renamed = {old: new for new, old in dict(cfg.env.columns or {}).items() if old != new}
        rows = rows.rename_columns({old: new for old, new in renamed.items() if old in rows.column_names})
    else:
        wanted = cfg.learner.samples_per_step * cfg.learner.steps
        count = min(wanted, MAX_ROWS, task.train_size or MAX_ROWS)
        rows = datasets.Dataset.from_list(list(task_rows(kind, task, tokenizer, count)))
    check_rows(kind, rows, path or f"the task {cfg.env.task}", cfg.learner.trl.get("dataset_text_field"))
    return rows


def read_dataset(path: str, scratch: str) -> datasets.Dataset:
    """A .jsonl, .json or .parquet file, a folder of `save_to_disk`, or the train split of a hub's name."""
    import datasets

    place = Path(path)
    readers = {
        ".jsonl": datasets.Dataset.from_json,
        ".json": datasets.Dataset.from_json,
        ".parquet": datasets.Dataset.from_parquet,
    }
    if place.suffix in readers and not place.is_file():
        raise UserError("there is no such dataset file", given=path, fix="give an existing file in env.path")
    try:
        if place.is_file() and place.suffix in readers:
            return readers[place.suffix](path, cache_dir=scratch)
        if place.is_dir():
            found = datasets.load_from_disk(path)
            return found["train"] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(path, split="train")
    except Exception as error:  # each reader has errors of its own
        raise UserError(
            f"the dataset can't be read: {str(error).splitlines()[0]}",
            given=path,
            allowed="a .jsonl, .json or .parquet file, a folder of save_to_disk, or a name on the hub",
        ) from error


def check_rows(kind: str, rows: Any, where: str, text_field: str | None = None) -> None:
    """Raise UserError when a dataset is empty or lacks the columns that TRL's trainer needs."""
    names = set(rows.column_names or [])
    sets = [{text_field}] if text_field else COLUMNS[kind]
    if not any(needed <= names for needed in sets):
        either = "; or ".join(" and ".join(sorted(needed)) for needed in sets)
        raise UserError(
            f"the dataset of {where} lacks columns that {kind} needs",
            given=f"columns {sorted(names)}",
            allowed=either,
            fix="rename them with env.columns={prompt: <your name>, ...}",
        )
    if len(rows) == 0:
        raise UserError(f"the dataset of {where} has no rows", given=f"columns {sorted(names)}, 0 rows")


def task_rows(kind: str, task: Any, tokenizer: Any, count: int) -> Iterator[dict[str, Any]]:
    """Rows of a text task's training split, from its demonstrations.

    For pairs, `chosen` is the demonstration and `rejected` the demonstration of the next prompt whose answer
    is wrong here. Raises UserError for a task without demonstrations.
    """
    for index in range(count):
        prompt, shown = task.train(index), task.demonstration(index)
        if shown is None:
            raise UserError(
                f"this task has no demonstrations, which {kind} learns from",
                fix="choose another env.task, or give a dataset in env.path",
            )
        before, after = written(prompt, shown, tokenizer)
        if kind == "pretrain":
            yield {"text": before + after}
        elif kind == "sft":
            yield {"prompt": before, "completion": after}
        else:
            wrong = next((text for text in _others(task, index) if task.check(prompt.meta, text) < 1), None)
            if wrong is not None:
                yield {"prompt": before, "chosen": after, "rejected": written(prompt, wrong, tokenizer)[1]}


def _others(task: Any, index: int) -> Iterator[str]:
    size = task.train_size
    for step in itertools.islice(itertools.count(1), TRIES):
        text = task.demonstration((index + step) % size if size else index + step)
        if text is not None:
            yield text


def written(prompt: Any, completion: str, tokenizer: Any) -> tuple[Any, Any]:
    """(prompt, completion) as TRL's columns hold them: both texts, or both lists of messages.

    TRL tokenizes the two texts as one. A blank or a line break is put between them where only then the tokens
    are those of the prompt, as a rollout sees it, and those of the completion.
    """
    if getattr(prompt, "messages", None):
        return prompt.messages, [{"role": "assistant", "content": completion}]
    before = tokenizer(prompt.text)["input_ids"]
    for between in ("", " ", "\n"):
        after = tokenizer(between + completion, add_special_tokens=False)["input_ids"]
        if tokenizer(prompt.text + between + completion)["input_ids"] == before + after:
            return prompt.text, between + completion
    return prompt.text, completion
