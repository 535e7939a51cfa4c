"""report.html of a run: one file that needs nothing else, with config, curves, video, evaluation, events.

Reads what the run directory holds and shows what it finds; knows no algorithm. Everything is escaped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from envs.errors import UserError
from trainers.checkpoint import write_error
from trainers.curves import setting, write_curves
from trainers.display import format_duration, format_value
from trainers.files import replace_file
from trainers.metrics import read_metrics
from trainers.samples_log import read_samples
from trainers.samples_table import POLICY, samples_table
from trainers.samples_table import STYLE as SAMPLES_STYLE

__all__ = ["write_curves", "write_report"]

TILES = (  # metric, label, over how many of the last reports the mean is taken
    ("env_steps", "environment steps", 1),
    ("episode_return", "return", 10),
    ("episode_cost", "true cost", 10),
    ("violation_rate", "episodes over the budget", 10),
    ("p_safe", "P_safe", 10),
    ("labels_used", "labels used", 1),
    ("reward", "reward", 10),
    ("mean_token_accuracy", "accuracy of a token", 10),
    ("accuracy", "pairs in the right order", 10),
    ("rewards/accuracies", "pairs in the right order", 10),
    ("loss", "loss", 10),
    ("completion_length", "tokens of a completion", 10),
    ("entropy", "entropy of a token in nats", 10),
    ("reward_failures", "rewards that failed", 10),
)
RATES = {
    "violation_rate", "greedy_accuracy", "mean_token_accuracy", "accuracy", "rewards/accuracies",
    "reward_failures",
}  # fmt: skip
NO_TILE = {"loss": "reward"}  # of a run that has the other: a policy's loss says nothing
VIDEOS = {"video.mp4": "video/mp4", "video.gif": "image/gif"}
STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2733; --faint: #66727f; --page: #f6f7f9; --card: #fff; --line: #dfe3e8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --faint: #94a1af; --page: #14181d; --card: #1d2329; --line: #333c46; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 2rem 1.2rem 4rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
p { margin: .3rem 0; }
.faint { color: var(--faint); }
.tiles, .curves { display: grid; gap: .8rem; }
.tiles { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); margin-top: 1.2rem; }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.35rem; }
.tile span { color: var(--faint); font-size: .85rem; }
.curves img { width: 100%; background: #fff; border: 1px solid var(--line); border-radius: 8px;
  padding: .4rem; }
.curves .wide { grid-column: 1 / -1; }
.config { columns: 2 420px; }
details { break-inside: avoid; padding-bottom: .6rem; }
.scroll { overflow-x: auto; }
.film { max-width: 100%; border-radius: 8px; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .3rem 1.4rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
summary { cursor: pointer; font-weight: 600; padding: .15rem 0; }
ul { margin: 0; padding-left: 1.2rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
code { font-size: .9rem; overflow-wrap: anywhere; }
"""


def write_report(run_dir: str | Path) -> Path:
    """Draw the curves anew and write `report.html` in the run's folder.

    Raises UserError for a folder without a readable config.json, and when the disk refuses.
    """
    run_dir = Path(run_dir)
    try:
        config = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"The config of run {run_dir.name!r} cannot be read: {error}.", given=str(run_dir)
        ) from error
    curves = write_curves(run_dir)
    rows = read_metrics(run_dir)
    status = _read_json(run_dir / "status.json") or {}
    sections = [
        _header(run_dir.name, config, rows, status),
        _section("Notes", _notes(_read_json(run_dir / "notes.json"))),
        _section("Evaluation", _evaluation(_read_json(run_dir / "evaluation.json"))),
        _section("One episode", _video(run_dir)),
        _section("Curves", _curves(curves)),
        _section("Samples", samples_table(read_samples(run_dir))),
        _section("Config", _config(config)),
        _section("Events", _events(run_dir / "events.log")),
    ]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(run_dir.name)}</title>'
        f'<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<style>{STYLE}{SAMPLES_STYLE}</style></head>\n"
        f"<body>{''.join(sections)}</body></html>\n"
    )
    path = run_dir / "report.html"
    try:
        replace_file(path, page)
    except OSError as error:
        raise write_error(
            error, "the report", path, "make room or restore access there, then repeat"
        ) from error
    return path


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n" if body else ""


def _header(
    name: str, config: Mapping[str, Any], rows: list[dict[str, Any]], status: Mapping[str, Any]
) -> str:
    algo, env = (config.get(section) or {} for section in ("algo", "env"))
    seed = (config.get("run") or {}).get("seed", 0)
    about = [algo.get("name"), env.get("id") or env.get("task"), f"seed {seed}"]
    if status:
        about.append(
            f"{status['status']} at step {status['step']} after {format_duration(status['seconds'])}"
        )
        about.append(status["reason"])
    tiles = "".join(_tiles(config, rows))
    line = escape(" · ".join(str(part) for part in about if part))
    below = f'<div class="tiles">{tiles}</div>' if tiles else '<p class="faint">Nothing was reported yet.</p>'
    return f'<h1>{escape(name)}</h1><p class="faint">{line}</p>{below}'


def _tiles(config: Mapping[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    budget = setting(config, "algo.budget")
    for metric, label, over in TILES:
        values = [row[metric] for row in rows[-over:] if row.get(metric) is not None]
        if not values or NO_TILE.get(metric) in rows[-1]:
            continue
        mean = values[0] if len(values) == 1 else sum(values) / len(values)
        shown = _number(metric, mean)
        if metric == "episode_cost" and budget is not None:
            shown, label = f"{shown} / {budget:g}", f"{label} / budget"
        label += f", mean of the last {len(values)} reports" if len(values) > 1 else ""
        yield f'<div class="tile"><b>{escape(shown)}</b><span>{escape(label)}</span></div>'


def _number(metric: str, value: float) -> str:
    rate = metric in RATES or metric.startswith("pass_at_k")
    return f"{100 * value:.1f} %" if rate else format_value(value)


def _notes(notes: Any) -> str:
    if not isinstance(notes, list):
        return ""
    return "<ul>" + "".join(f"<li>{escape(str(note))}</li>" for note in notes) + "</ul>" if notes else ""


def _evaluation(evaluation: Any) -> str:
    """A table: measured quantities ({mean, ci95, n}) by the policy as trained and each nested set of them.

    A nested set of other quantities (pass_at_k by k) is more rows.
    """
    if not isinstance(evaluation, Mapping):
        return ""
    sets = {"as trained": evaluation}
    for name, value in list(evaluation.items()):
        if not isinstance(value, Mapping) or _is_summary(value):
            continue
        if value.keys() & evaluation.keys():
            sets[name] = value
        else:
            evaluation = {**evaluation, **{f"{name} {key}": inner for key, inner in value.items()}}
            sets["as trained"] = evaluation
    rows = [name for name, value in evaluation.items() if _is_summary(value)]
    head = "".join(f"<th>{escape(_words(title))}</th>" for title in ["quantity", *sets])
    body = "".join(
        f"<tr><td>{escape(_words(row))}</td>"
        + "".join(f'<td class="number">{_summary(row, values.get(row))}</td>' for values in sets.values())
        + "</tr>"
        for row in rows
    )
    facts = [
        f"{_words(name)} {value}"
        for name, value in evaluation.items()
        if not isinstance(value, Mapping) and value is not None and name not in ("video", "prompts")
    ]
    count = evaluation[rows[0]]["n"] if rows else 0
    what = "prompts" if "prompts" in evaluation else "episodes"
    caption = f"{count} {what}; mean and 95 % confidence interval. {', '.join(facts)}."
    table = f"<table><tr>{head}</tr>{body}</table>"
    return f'<div class="card scroll">{table}<p class="faint">{escape(caption)}</p></div>'


def _is_summary(value: Any) -> bool:
    return isinstance(value, Mapping) and "mean" in value


def _summary(metric: str, value: Any) -> str:
    if not _is_summary(value):
        return "–"
    interval = value.get("ci95")
    between = f" [{', '.join(_number(metric, bound) for bound in interval)}]" if interval else ""
    return f'{escape(_number(metric, value["mean"]))}<span class="faint">{escape(between)}</span>'


def _video(run_dir: Path) -> str:
    for name, kind in VIDEOS.items():
        if (run_dir / name).is_file():
            source = f'src="data:{kind};base64,{_base64(run_dir / name)}"'
            if kind.startswith("image"):
                return f'<img class="film" alt="one episode" {source}>'
            return f"<video class=film controls loop muted autoplay playsinline {source}></video>"
    return ""


def _curves(paths: Iterable[Path]) -> str:
    images = "".join(
        f'<img alt="{escape(path.stem)}" {"class=wide " if path.stem == "others" else ""}'
        f'src="data:image/png;base64,{_base64(path)}">'
        for path in paths
    )
    return f'<div class="curves">{images}</div>' if images else ""


def _config(config: Mapping[str, Any]) -> str:
    single = {k: v for k, v in config.items() if not isinstance(v, Mapping)}
    groups = {k: v for k, v in config.items() if isinstance(v, Mapping)}
    groups |= {"others": single} if single else {}
    parts = []
    for name, group in groups.items():
        rows = "".join(
            f"<tr><td><code>{escape(key)}</code></td><td><code>{escape(text)}</code></td></tr>"
            for key, text in _flat(group)
        )
        table = f'<div class="scroll"><table>{rows}</table></div>'
        parts.append(f"<details open><summary>{escape(name)}</summary>{table}</details>")
    return f'<div class="card config">{"".join(parts)}</div>'


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)


def _events(path: Path) -> str:
    if not path.is_file():
        return ""
    return f'<div class="card"><pre>{escape(path.read_text("utf-8", errors="replace"))}</pre></div>'


def _read_json(path: Path) -> Any:
    """The content of an optional file; None if it is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _words(name: str) -> str:
    return name.replace("_", " ")


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
