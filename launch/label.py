"""Label a run's clips: `python launch/label.py run=<name> [page=true] [host=127.0.0.1] [port=8766]`.

For runs with algo.label=human, which wait for labels and serve a page themselves. This shows the same queue
in the terminal, or (page=true) serves the page from here, for example on another machine with that folder.
Exit codes: 0 done; 2 wrong input; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import time
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
class LabelConfig:
    """Whose clips are labelled, and how they are shown."""

    run: str | None = None
    page: bool = False
    host: str = "127.0.0.1"
    port: int = 8766
    dir: str = "runs"


def main(argv: Sequence[str]) -> int:
    """Shows the queue of a run; the exit code."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        preflight.check_installation()
        from launch.arguments import read_into
        from rewards.label_queue import LabelQueue
        from trainers.run import Run

        cfg = read_into(LabelConfig, argv)
        if cfg.run is None:
            names = sorted(path.parent.name for path in Path(cfg.dir).glob("*/labels"))
            raise UserError(
                "which run?", allowed=names or f"no run in {cfg.dir}/ asks for labels", fix="run=<name>"
            )
        run = Run.open(cfg.run, cfg.dir)
        if not (run.path / "labels").is_dir():
            raise UserError(
                f"run {run.name!r} does not ask a person for labels",
                fix="train with algo.label=human",
            )
        queue = LabelQueue(run.path / "labels")
        if cfg.page:
            return serve(queue, cfg)
        from rewards.label_terminal import label_in_terminal

        print(f"{label_in_terminal(queue)} answers given")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def serve(queue, cfg: LabelConfig) -> int:
    """Serve the page until Ctrl-C."""
    from rewards.label_server import LabelServer

    server = LabelServer(queue, cfg.host, cfg.port)
    print(f"the page is at {server.url} until Ctrl-C", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
