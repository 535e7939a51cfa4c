"""Seconds from the command to the first environment step, the median of warm runs.

    python benchmarks/startup.py [--runs 5] [algo=tracess env=safety-gym ...]

Each run is the real command in a fresh process with a temporary run directory. It reports the time itself:
from its process's start to the first step that an env runner takes (`first_env_step_seconds` of its first
metrics line). Then it is stopped. One run before the measured ones warms the disk cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 180.0


def first_env_step_seconds(arguments: list[str]) -> float:
    """Run the command until its first metrics line; SystemExit with its output when it ends without one."""
    with tempfile.TemporaryDirectory() as runs, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "launch/train.py", *arguments, f"run.dir={runs}", "run.name=startup"]
        child = subprocess.Popen(command, cwd=CHECKOUT, stdout=output, stderr=subprocess.STDOUT)
        metrics = Path(runs) / "startup" / "metrics.jsonl"
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while child.poll() is None and time.monotonic() < deadline:
                if metrics.is_file() and (line := metrics.read_text()).endswith("\n"):
                    return float(json.loads(line.splitlines()[0])["first_env_step_seconds"])
                time.sleep(0.1)
            output.seek(0)
            raise SystemExit(f"no metrics line within {TIMEOUT_S:.0f} s:\n{output.read()[-3000:]}")
        finally:
            child.terminate()  # it writes a checkpoint and stops its Ray
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("arguments", nargs="*", default=["algo=tracess", "env=safety-gym"])
    args = parser.parse_args()
    first_env_step_seconds(args.arguments)
    seconds = []
    for run in range(args.runs):
        seconds.append(first_env_step_seconds(args.arguments))
        print(f"run {run + 1}: {seconds[-1]:.1f} s", flush=True)
    print(f"median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f} s")


if __name__ == "__main__":
    main()
