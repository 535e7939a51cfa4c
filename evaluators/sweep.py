"""A table over the runs of a sweep: what was varied, and what came out, mean and spread over seeds.

Reads run directories; knows no algorithm: every figure that an evaluation gives with a mean is a column.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.statistics import mean_summary

SEED = "run.seed"
UNINTERESTING = {"episode_length"}


def write_sweep(folder: Path) -> list[dict[str, Any]]:
    """table.md and results.json from sweep.json and the evaluated runs in `folder`; one row a run."""
    jobs: dict[str, dict[str, str]] = json.loads((folder / "sweep.json").read_text())
    rows = []
    for name, settings in jobs.items():
        path = folder / name / "evaluation.json"
        if path.exists():
            found = json.loads(path.read_text())
            figures = {k: v["mean"] for k, v in found.items() if isinstance(v, dict) and "mean" in v}
            rows.append({"run": name, "settings": settings, **figures})
    (folder / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    (folder / "table.md").write_text(_table(rows, list(jobs.values())))
    return rows


def _table(rows: list[dict[str, Any]], jobs: list[dict[str, str]]) -> str:
    """Markdown: a line for every combination of varied settings besides the seed, in the sweep's order."""
    varied = [k for k in jobs[0] if k != SEED and len({job.get(k) for job in jobs}) > 1]
    figures = [k for k in (rows[0] if rows else {}) if k not in {"run", "settings", *UNINTERESTING}]
    names = [*varied, "seeds", *(f.replace("_", " ") for f in figures)]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row["settings"][k] for k in varied), []).append(row)
    for values, own in groups.items():
        cells = [_spread([row[f] for row in own if row.get(f) is not None]) for f in figures]
        lines.append(f"| {' | '.join([*values, str(len(own)), *cells])} |")
    missing = len(jobs) - len(rows)
    return "\n".join(lines) + "\n" + (f"\n{missing} runs have no evaluation.\n" if missing else "")


def _spread(values: list[float]) -> str:
    """Mean ± standard deviation over seeds, and the mean's 95 % interval."""
    if not values:
        return "-"
    summary = mean_summary(values)
    text = f"{summary['mean']:.4g}"
    if summary["ci95"] is not None:
        low, high = summary["ci95"]
        text += f" ± {np.std(values, ddof=1):.2g} [{low:.4g}, {high:.4g}]"
    return text
