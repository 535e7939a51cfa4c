"""Evaluate a run: `python launch/evaluate.py run=<name> [episodes=100] [seed=0] [video=false] [dir=runs]`.

Control: a table of return, cost and violation rate over whole episodes, and a video. Language: greedy
accuracy and pass@k over held-out prompts (`episodes` of them). All with confidence intervals; writes
evaluation.json and report.html into the run's folder. Exit codes: 0 done; 2 wrong input; 130 Ctrl-C.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
class EvaluateConfig:
    """What to evaluate: a run by its name in `dir` or by its path, for how many episodes or prompts."""

    run: str | None = None
    episodes: int = 100
    seed: int = 0
    video: bool = True  # of control
    dir: str = "runs"


def main(argv: Sequence[str]) -> int:
    """Evaluates the newest whole checkpoint of a run; the exit code."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        preflight.check_installation()
        from launch.arguments import read_into
        from trainers.run import Run

        cfg = read_into(EvaluateConfig, argv)
        if cfg.run is None:
            names = sorted(path.parent.name for path in Path(cfg.dir).glob("*/config.json"))
            raise UserError("which run?", allowed=names or f"no run is in {cfg.dir}/", fix="run=<name>")
        if cfg.episodes < 1:
            raise UserError("episodes must be at least 1", given=cfg.episodes)
        run = Run.open(cfg.run, cfg.dir)
        from trainers.config import engine_of, evaluator_of, typed
        from trainers.report import write_report

        settings = typed(run.config)
        engine = engine_of(settings.algorithm)
        preflight.check_extras(engine.extras(settings))
        preflight.check_writable(run.path)
        evaluator = evaluator_of(settings.algorithm)
        if evaluator is None:
            raise UserError(f"a run of algo={settings.algo.name} has nothing to evaluate", given=cfg.run)
        filmed = "video" in inspect.signature(evaluator.evaluate_run).parameters
        more = {"video": cfg.video} if filmed else {}
        evaluator.print_table(evaluator.evaluate_run(run.path, episodes=cfg.episodes, seed=cfg.seed, **more))
        print(f"report: {write_report(run.path)}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
