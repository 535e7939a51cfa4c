"""metrics.jsonl: one JSON object a line, oldest first. Reads lines and checks values; who writes is `Run`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from envs.errors import UserError


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, oldest first; a line that is still being written is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    return [row for _, row in whole_lines(path.read_bytes())] if path.is_file() else []


def whole_lines(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """Whole lines with their rows, up to the first torn one (a crash can tear more than the last)."""
    found: list[tuple[bytes, dict[str, Any]]] = []
    for line in data.splitlines(keepends=True):
        try:
            row = json.loads(line)
            if not line.endswith(b"\n") or not isinstance(row["step"], int):
                break
        except (ValueError, KeyError, TypeError):
            break
        found.append((line, row))
    return found


def checked_number(name: str, value: Any, step: int) -> float | int | None:
    """A metric as a Python number or None; UserError for NaN and infinities, TypeError for other things."""
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value  # NumPy and torch scalars
    if not isinstance(value, int | float):
        raise TypeError(f"metric {name!r} at step {step} is {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise UserError(
            f"The metric {name!r} became {value} at step {step}.",
            fix="look at the metrics before that step; a lower learning rate usually helps",
        )
    return int(value) if isinstance(value, int) else value
