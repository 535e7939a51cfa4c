"""samples.jsonl of a run as a reader sees it. What is written there, and when, is the Feed's affair.

A line is {"step": learner steps before its batch, "id", "version", "prompt", "completion", "finish",
"tokens", "reward": the weighted sum, "rewards": {name: x | {"value": x, <part>: y} | {"failure": name} |
null where it does not apply}}.
What a model wrote may be anything: `visible` takes the teeth out of it before a terminal or a page sees it.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.display import format_value
from trainers.metrics import whole_lines

FILE = "samples.jsonl"
Record = Mapping[str, Any]


def read_samples(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of samples.jsonl, oldest first; a line that is still being written is left out."""
    path = Path(run_dir) / FILE
    return [row for _, row in whole_lines(path.read_bytes())] if path.is_file() else []


def visible(text: str) -> str:
    """`text` with every character that is not shown as itself (control, bidirectional, surrogate, private)
    written as its code, so that it can neither move the cursor nor pretend to be other text."""
    return "".join(
        c if c in "\n\t" or not unicodedata.category(c).startswith("C") else _code(ord(c)) for c in text
    )


def _code(point: int) -> str:
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}"


def rewards_in_words(record: Record) -> str:
    """For example `exact 1, format 0.5 (opened 1, closed 0), math failed (timeout)`."""
    return ", ".join(f"{visible(name)} {_reward(value)}" for name, value in record["rewards"].items())


def _reward(value: Any) -> str:
    if value is None:
        return "not applicable"
    if not isinstance(value, Mapping):
        return _short(value)
    if "failure" in value:
        return f"failed ({visible(str(value['failure']))})"
    parts = ", ".join(f"{visible(k)} {_short(v)}" for k, v in value.items() if k != "value")
    return f"{_short(value['value'])} ({parts})"


def _short(x: float) -> str:
    return format_value(int(x) if float(x).is_integer() else x)


def shown(records: Sequence[Record], length: int = 400) -> str:
    """Samples for the screen: each one's reward with its parts, then prompt and completion."""
    lines = []
    for record in records:
        ended = {"eos": "ended", "length": "cut off", "stop": "stopped"}.get(record["finish"], "")
        lines.append(
            f"  reward {_short(record['reward'])}: {rewards_in_words(record)} "
            f"· {record['tokens']} tokens, {ended}"
        )
        for name in ("prompt", "completion"):
            text = visible(record[name].strip("\n")) or "(empty)"
            if len(text) > length:
                text = f"{text[:length]} ... ({len(record[name]):,} characters)"
            lines.append(f"    {name:<10}  {textwrap.indent(text, ' ' * 16).lstrip()}")
    return "\n".join(lines)


def spread(values: Sequence[float], count: int) -> list[int]:
    """Indices of `count` of the values from the highest to the lowest, evenly over their ranks."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    count = min(count, len(order))
    return [order[k * (len(order) - 1) // max(1, count - 1)] for k in range(count)]
