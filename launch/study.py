"""Several arms over several seeds, one table and one figure:
`python launch/study.py name=<study> algos=[ppo,ppo_lag] seeds=[20,21] [settings='"size=long"'] [jobs=1]`.

Every run is `launch/train.py` in a process of its own, in runs/<study>/<algo>-seed<k>; runs that are done are
not repeated, so a study that was stopped goes on where it was. Writes table.md, results.json and curves.png.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
# The checkout first, and this folder not at all: its evaluate.py must not hide a library of that name.
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p).resolve() not in (CHECKOUT, CHECKOUT / "launch")),
]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from envs.errors import UserError
from launch import preflight


@dataclass(kw_only=True)
class StudyConfig:
    """What to run; `settings` are further settings of launch/train.py, separated by spaces."""

    name: str | None = None
    algos: list[str] = field(default_factory=lambda: ["ppo", "ppo_lag"])
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    settings: str = ""
    episodes: int = 100  # of the final evaluation of each policy
    jobs: int = 1  # runs at a time
    dir: str = "runs"


def main(argv: Sequence[str]) -> int:
    """Run what is missing, then write the tables; the exit code."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        preflight.check_installation()
        from launch.arguments import algorithm, read_into
        from launch.phases import trains_a_model

        cfg = read_into(StudyConfig, argv)
        if cfg.name is None:
            raise UserError("a study needs a name", fix="name=<study>")
        for arm in cfg.algos:
            if trains_a_model(algorithm(arm)):
                raise UserError(
                    "a study compares control runs by return and cost", given=f"algos=[{','.join(cfg.algos)}]"
                )
        if cfg.jobs < 1:
            raise UserError("jobs must be at least 1", given=cfg.jobs)
        folder = Path(cfg.dir) / cfg.name
        folder.mkdir(parents=True, exist_ok=True)
        preflight.check_writable(folder)
        failed = run_all(cfg, folder)
        from evaluators.study import write_study

        rows = write_study(folder, cfg.algos, cfg.seeds)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    print((folder / "table.md").read_text())
    print(f"{len(rows)} runs in {folder}: table.md, results.json, curves.png")
    for name in failed:
        print(f"failed: {name}, see {folder / (name + '.log')}", file=sys.stderr)
    return 1 if failed else 0


def run_all(cfg: StudyConfig, folder: Path) -> list[str]:
    """Train and evaluate every missing run, `jobs` at a time; the names of those that failed."""
    todo = [(arm, seed) for seed in cfg.seeds for arm in cfg.algos]
    stop = threading.Event()
    with ThreadPoolExecutor(cfg.jobs) as executor:
        try:
            codes = list(executor.map(lambda job: _run(cfg, folder, job[0], job[1], stop), todo))
        except KeyboardInterrupt:
            stop.set()
            raise
    return [f"{arm}-seed{seed}" for (arm, seed), code in zip(todo, codes, strict=True) if code]


def _run(cfg: StudyConfig, folder: Path, arm: str, seed: int, stop: threading.Event) -> int:
    """One run, resumed or started; its exit code. Nothing is started once `stop` is set."""
    name = f"{arm}-seed{seed}"
    path = folder / name
    if stop.is_set() or (path / "study.json").exists():
        return 0
    started = time.perf_counter()
    where = f"run.dir={shlex.quote(str(folder))}"
    if (path / "config.json").exists():
        train = [f"resume={name}", where]
    else:
        train = [f"algo={arm}", f"run.seed={seed}", f"run.name={name}", where, *shlex.split(cfg.settings)]
    evaluate = [f"run={name}", f"dir={folder}", f"episodes={cfg.episodes}", f"seed={seed}"]
    with open(folder / f"{name}.log", "a") as log:
        for script, arguments in (("train.py", [*train, "run.display=plain"]), ("evaluate.py", evaluate)):
            print(f"{name}: {script}", flush=True)
            command = [sys.executable, str(CHECKOUT / "launch" / script), *arguments]
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
            if script == "train.py":
                wall = time.perf_counter() - started
            if code:
                return code
    (path / "study.json").write_text(json.dumps({"wall_seconds": wall}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
