"""Problems of one reasoning-gym generator, made in a process whose string hashes are fixed. Scores nothing.

Some generators draw from sets of strings, whose order differs from process to process unless PYTHONHASHSEED
is set before the start: only so are the same prompts drawn in every process and after a restart.
Lines of JSON in, lines of JSON out; ends with its input.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

TAG = "(type)"  # of values that JSON lacks
SIZE = 500  # of a dataset; some generators make all of it at once
# Where a generator keeps a right answer when `answer` is empty or one of many.
EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")


def freeze(value: Any) -> Any:
    """A generator's entry in JSON's types; tuples, fractions and dicts with other keys are marked."""
    if isinstance(value, dict):
        if all(type(key) is str and key != TAG for key in value):
            return {key: freeze(item) for key, item in value.items()}
        return {TAG: "dict", "items": [[freeze(k), freeze(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [freeze(item) for item in value]}
    if isinstance(value, list):
        return [freeze(item) for item in value]
    if isinstance(value, Fraction):
        return {TAG: "fraction", "items": [value.numerator, value.denominator]}
    return value


def thaw(value: Any) -> Any:
    """Undo of `freeze`."""
    if isinstance(value, list):
        return [thaw(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: thaw(item) for key, item in value.items()}
    items, kind = thaw(value["items"]), value[TAG]
    return dict(items) if kind == "dict" else tuple(items) if kind == "tuple" else Fraction(*items)


def solution(score: Callable[[str, Any], float], entry: dict[str, Any]) -> str | None:
    """An answer that the generator's own verifier calls right, if the entry holds one."""
    known = [entry["answer"], *(entry.get("metadata", {}).get(name) for name in EXAMPLES)]
    for answer in known:
        text = json.dumps(answer) if isinstance(answer, dict | list) else answer
        if isinstance(text, str) and text and score(text, entry) >= 1.0:
            return text
    return None


def main() -> None:
    """First line: {"name", "options"}; then {"seed", "index"} each; answers in their order."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what generators print is nobody's
    warnings.simplefilter("ignore")

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    first = json.loads(sys.stdin.readline())
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if first["name"] not in DATASETS:
            reply(unknown=sorted(DATASETS))
            return

        @functools.lru_cache(maxsize=8)
        def dataset(seed: int) -> Any:
            return reasoning_gym.create_dataset(
                first["name"], **{"size": SIZE, **first["options"], "seed": seed}
            )

        dataset(0)
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")
        return
    reply(size=len(dataset(0)))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            data = dataset(request["seed"])
            entry = data[request["index"]]
            reply(entry=freeze(entry), shown=solution(data.score_answer, entry))
        except Exception as error:
            reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
