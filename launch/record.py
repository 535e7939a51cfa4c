"""Record labelled trajectories: `python launch/record.py run=<name> out=<file> [episodes=200] [budget=25]`.

The newest checkpoint's policy plays, the simulated annotator labels whole episodes and a prefix every
`slice_steps`, and the file holds observations, actions, rewards and labels, never a cost or the budget.
Train on it with algo.offline=<file>. append=true adds another run's episodes to the file; both kinds of
labels must be in it.
Exit codes: 0 done; 2 wrong input; 130 Ctrl-C.
"""

from __future__ import annotations

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
class RecordConfig:
    """Which run plays how many episodes, how they are labelled and where they are written."""

    run: str | None = None
    out: str | None = None
    episodes: int = 200
    budget: float | None = None  # of the annotator; None: the run's own
    noise: float = 0.0
    slice_steps: int = 10
    deterministic: bool = False  # play the mean action
    append: bool = False
    seed: int = 0
    dir: str = "runs"


def main(argv: Sequence[str]) -> int:
    """Plays, labels and writes; the exit code."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        preflight.check_installation()
        from launch.arguments import read_into
        from trainers.run import Run

        cfg = read_into(RecordConfig, argv)
        if cfg.run is None:
            names = sorted(path.parent.name for path in Path(cfg.dir).glob("*/config.json"))
            raise UserError("which run?", allowed=names or f"no run is in {cfg.dir}/", fix="run=<name>")
        if cfg.out is None:
            raise UserError("where shall the trajectories be written?", fix="out=<file>")
        run = Run.open(cfg.run, cfg.dir)
        if "model" in run.config:
            raise UserError(f"run '{run.name}' trained a language model: it has no trajectories to label")
        preflight.check_extras(["safety"] if run.config["env"]["kind"] == "safety-gym" else [])
        preflight.check_writable(Path(cfg.out).absolute().parent)
        from evaluators.recorder import record_run
        from rewards.labels import ThresholdOracle

        budget = float(run.config["algo"]["budget"]) if cfg.budget is None else cfg.budget
        added = record_run(
            run.path,
            cfg.out,
            oracle=ThresholdOracle(budget, cfg.noise),
            episodes=cfg.episodes,
            slice_steps=cfg.slice_steps,
            seed=cfg.seed,
            deterministic=cfg.deterministic,
            append=cfg.append,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    unsafe = sum(t.labels[-1] == 0 for t in added)
    print(f"{cfg.out}: {len(added)} trajectories added, {unsafe} of them unsafe at budget {budget:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
