"""Tables and a figure over the finished runs of a study. Reads run directories, trains nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.statistics import mean_summary
from trainers.curves import COLORS, LIMIT_COLOR, keep_matplotlib_out_of_home
from trainers.metrics import read_metrics

LATE_STEPS = 20  # of the last learner steps, whose training cost is averaged


def write_study(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """table.md, results.json and curves.png from the runs `<arm>-seed<k>` in `folder`; the rows."""
    rows = []
    for arm in arms:
        for seed in seeds:
            path = folder / f"{arm}-seed{seed}"
            if (path / "study.json").exists():
                rows.append({"arm": arm, "seed": seed, **_read(path)})
    (folder / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    (folder / "table.md").write_text(_table(rows, arms))
    _figure(folder, rows, arms)
    return rows


def _read(path: Path) -> dict[str, Any]:
    """The figures of one run; costs are true costs, `late` the mean over the last training steps."""
    evaluation = json.loads((path / "evaluation.json").read_text())
    metrics = read_metrics(path)
    last = metrics[-1]
    return {
        "return": evaluation["episode_return"]["mean"],
        "cost": evaluation["episode_cost"]["mean"],
        "violations": evaluation["violation_rate"]["mean"],
        "mean_action_return": evaluation["deterministic"]["episode_return"]["mean"],
        "mean_action_cost": evaluation["deterministic"]["episode_cost"]["mean"],
        "late_cost": float(np.mean([m["episode_cost"] for m in metrics[-LATE_STEPS:]])),
        "late_violations": float(np.mean([m["violation_rate"] for m in metrics[-LATE_STEPS:]])),
        "labels": last["labels_used"],
        "queries_code": last.get("queries_code"),
        "queries_minimal": last.get("queries_minimal"),
        "env_steps": last["env_steps"],
        "budget": evaluation["budget"],
        "wall_seconds": json.loads((path / "study.json").read_text())["wall_seconds"],
    }


def _table(rows: list[dict[str, Any]], arms: Sequence[str]) -> str:
    """Markdown: one row a run, then one row an arm with mean and standard deviation over seeds."""
    lines = [
        "| arm | seed | return | true cost | episodes over budget | late training cost / over budget "
        "| mean action: return / cost | labels (trajectories / code / minimal) | wall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        labels = f"{r['labels']} / {r['queries_code']} / {r['queries_minimal']}" if r["labels"] else "-"
        lines.append(
            f"| {r['arm']} | {r['seed']} | {r['return']:.0f} | {r['cost']:.1f} | {r['violations']:.0%} "
            f"| {r['late_cost']:.1f} / {r['late_violations']:.0%} "
            f"| {r['mean_action_return']:.0f} / {r['mean_action_cost']:.1f} | {labels} "
            f"| {r['wall_seconds']:.0f} |"
        )
    lines += [
        "",
        "| arm | seeds | return | true cost | episodes over budget | wall s |",
        "|---|---|---|---|---|---|",
    ]
    for arm in arms:
        own = [r for r in rows if r["arm"] == arm]
        if own:
            cells = [_spread([r[k] for r in own], f) for k, f in _SUMMARY]
            lines.append(f"| {arm} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


_SUMMARY = (("return", ".0f"), ("cost", ".1f"), ("violations", ".0%"), ("wall_seconds", ".0f"))


def _spread(values: list[float], form: str) -> str:
    """Mean +- standard deviation over seeds, and the mean's 95 % interval."""
    summary = mean_summary(values)
    text = f"{summary['mean']:{form}}"
    if summary["ci95"] is not None:
        low, high = summary["ci95"]
        text += f" ± {np.std(values, ddof=1):{form}} [{low:{form}}, {high:{form}}]"
    return text


def _figure(folder: Path, rows: list[dict[str, Any]], arms: Sequence[str]) -> None:
    """Return and true cost against env steps: a thin line a run, a thick one for the mean over seeds."""
    keep_matplotlib_out_of_home()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for color, arm in zip(COLORS, arms):
        runs = [read_metrics(folder / f"{arm}-seed{r['seed']}") for r in rows if r["arm"] == arm]
        if not runs:
            continue
        length = min(len(run) for run in runs)
        steps = [m["env_steps"] for m in runs[0][:length]]
        for axis, key in zip(axes, ("episode_return", "episode_cost")):
            curves = np.array([[m[key] for m in run[:length]] for run in runs], float)
            axis.plot(steps, curves.T, color=color, alpha=0.25, linewidth=0.8)
            axis.plot(steps, np.nanmean(curves, 0), color=color, linewidth=2.0, label=arm)
    axes[0].set(xlabel="environment steps", ylabel="return per episode")
    axes[1].set(xlabel="environment steps", ylabel="true cost per episode")
    if rows:
        axes[1].axhline(rows[0]["budget"], color=LIMIT_COLOR, linestyle="--", linewidth=1.2, label="budget")
    for axis in axes:
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "curves.png", dpi=150)
    plt.close(figure)
