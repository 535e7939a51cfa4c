"""Curves of a run as PNG files, one per group of metrics. Reads metrics.jsonl and config.json only."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.checkpoint import write_error
from trainers.files import replace_file
from trainers.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2f6db3", "#d1603d", "#3d9970", "#8a5fb0", "#b5892b", "#5d6d7e")
LIMIT_COLOR = "#c0392b"


@dataclass(frozen=True)
class Group:
    """One figure: the metrics whose names match `pattern`, an axis label with its unit, and a limit to draw.

    `limit` is (dotted key in the config, legend), drawn if the config has that key.
    """

    file: str
    title: str
    axis: str
    pattern: str
    limit: tuple[str, str] | None = None


GROUPS = (
    Group("return", "Return", "return per episode", r"episode_return(_.*)?"),
    Group("cost", "True cost", "cost per episode", r"episode_cost(_.*)?", ("algo.budget", "budget")),
    Group("violations", "Episodes over the budget", "share of episodes", r"violation_rate(_.*)?"),
    Group("p_safe", "Probability of a safe episode", "P_safe", r"p_safe.*", ("algo.p_safe_limit", "limit")),
    Group("labels", "Labels used so far", "labels", r"labels_used"),
    Group("queries", "Queries so far", "queries", r".*quer(y|ies).*"),
    Group("multiplier", "Lagrange multiplier", "multiplier", r"multiplier.*"),
    Group("throughput", "Throughput", "environment steps per second", r".*steps_per_second"),
    Group("time", "Time of one learner step", "seconds", r"seconds_.*"),
    Group("length", "Episode length", "environment steps per episode", r"episode_length.*"),
)
LANGUAGE = (  # of runs that take no environment steps
    Group("reward", "Reward", "mean over a batch", r"reward|reward/[^/]+"),
    Group("accuracy", "Accuracy", "share", r"mean_token_accuracy|accuracy|rewards/accuracies"),
    Group("loss", "Loss", "loss", r"loss"),
    Group("tokens", "Length of completions", "tokens", r"completion_length.*"),
    Group("entropy", "Entropy of the policy", "nats per token", r"entropy"),
    Group("kl", "Distance to the reference policy", "KL in nats per token", r"kl"),
    Group("clip", "Clipped ratios", "share of tokens", r"clip_ratio/.*_mean"),
    Group("age", "Age of the weights that drew", "learner steps", r"policy_age"),
    Group("mismatch", "Engine mismatch", "mean |difference| of log-probabilities", r"engine_mismatch"),
    Group(
        "lost",
        "Nothing to learn from",
        "share",
        r"frac_reward_zero_std|reward_failures|completions_cut",
    ),
    Group("margin", "Margin of chosen over rejected", "reward", r"margin|rewards/margins"),
    Group("gradient", "Norm of the gradient before clipping", "norm", r"grad_norm"),
)
NOT_CURVES = {"step", "env_steps", "seconds", "epoch"}
IN_ENV_STEPS = "environment steps"
Curve = tuple[np.ndarray, np.ndarray]


def write_curves(run_dir: str | Path) -> list[Path]:
    """`curves/<group>.png` for every group of metrics that was reported; the ungrouped share `others.png`.

    The x axis is `env_steps`, or the learner step for runs without; these have the LANGUAGE groups. Raises
    UserError when the disk refuses.
    """
    run_dir = Path(run_dir)
    keep_matplotlib_out_of_home()
    rows = read_metrics(run_dir)
    config = json.loads((run_dir / "config.json").read_text())
    x_label, curves = collect(rows)
    folder = run_dir / "curves"
    figures = {}
    for group in GROUPS if x_label == IN_ENV_STEPS else LANGUAGE:
        members = {name: curves.pop(name) for name in list(curves) if re.fullmatch(group.pattern, name)}
        if members:
            figures[group.file] = _draw_group(group, members, x_label, config)
    if curves:
        figures["others"] = _draw_others(curves, x_label)
    try:
        folder.mkdir(exist_ok=True)
        for name, figure in figures.items():
            drawn = io.BytesIO()
            figure.savefig(drawn, dpi=110)
            replace_file(folder / f"{name}.png", drawn.getvalue())
    except OSError as error:
        raise write_error(
            error, "the curves", folder, "make room or restore access there, then repeat"
        ) from error
    return [folder / f"{name}.png" for name in figures]


def keep_matplotlib_out_of_home() -> None:
    """Let matplotlib keep its font list in a temporary folder of this user, unless MPLCONFIGDIR is set.

    The home may be read-only, or not there; then matplotlib would list all fonts again in every run. Call it
    before matplotlib is imported.
    """
    folder = Path(tempfile.gettempdir()) / f"seedbed-matplotlib-{os.getuid()}"
    with contextlib.suppress(OSError):  # then matplotlib finds a place for this run alone
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.is_symlink():
            os.environ.setdefault("MPLCONFIGDIR", str(folder))


def collect(rows: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Curve]]:
    """(label of the x axis, {metric: (x, y)}) without the rows where a metric is null or missing."""
    names = {name: None for row in rows for name in row if name not in NOT_CURVES}
    in_env_steps = bool(rows) and "env_steps" in rows[0]
    key, label = ("env_steps", IN_ENV_STEPS) if in_env_steps else ("step", "learner steps")
    curves = {}
    for name in names:
        points = [(row[key], row[name]) for row in rows if row.get(name) is not None]
        if len(points) > 1:
            x, y = np.array(points, float).T
            curves[name] = x, y
    return label, curves


def smooth(y: np.ndarray) -> np.ndarray | None:
    """Centred moving mean (n,) over a twentieth of the points, at the ends over fewer.

    None for few points and for counters (curves that never fall), which are drawn as they are.
    """
    half = len(y) // 40
    if half < 1 or np.all(np.diff(y) >= 0):
        return None
    total = np.concatenate([[0.0], np.cumsum(y)])
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def setting(config: Mapping[str, Any], dotted: str) -> float | None:
    """The number at a dotted key of the config, None if there is none."""
    node: Any = config
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return float(node) if isinstance(node, int | float) and not isinstance(node, bool) else None


def _draw_group(
    group: Group, members: Mapping[str, Curve], x_label: str, config: Mapping[str, Any]
) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, curve), color in zip(members.items(), itertools.cycle(COLORS)):
        if len(members) > 1:
            label = name.replace("_", " ")
        else:
            label = "" if smooth(curve[1]) is None else "moving mean"
        _draw(axes, curve, color, label)
    limit = setting(config, group.limit[0]) if group.limit else None
    if group.limit and limit is not None:
        label = f"{group.limit[1]} {limit:g}"
        axes.axhline(limit, color=LIMIT_COLOR, linestyle="--", linewidth=1.4, label=label)
    _finish(axes, group.title, x_label, group.axis)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    return figure


def _draw_others(curves: Mapping[str, Curve], x_label: str) -> Figure:
    from matplotlib.figure import Figure

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(max(3.6 * columns, 5.0), 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, curve) in zip(grid.flat, curves.items(), strict=False):
        _draw(axes, curve, COLORS[0])
        _finish(axes, name.replace("_", " "), "", "")
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes in grid.flat[max(0, len(curves) - columns) : len(curves)]:
        axes.set_xlabel(x_label, fontsize=8)
    return figure


def _draw(axes: Axes, curve: Curve, color: str, label: str = "") -> None:
    x, y = curve
    mean = smooth(y)
    if mean is None:
        axes.plot(x, y, color=color, linewidth=1.6, label=label)
    else:
        axes.plot(x, y, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(x, mean, color=color, linewidth=1.8, label=label)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, loc="left", fontsize=11 if x_label else 9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9 if x_label else 7)
    axes.margins(x=0.01)
