"""How the benchmark counts: ratios within a repeat, medians over repeats, memory of a process tree."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.control import summarize, table, tree_mib


def row(steps_per_second: float, **other: float) -> dict[str, float]:
    keys = ("iteration_s", "sampling_s", "learning_s", "gradient_steps", "driver_cpu_s")
    memory = {"peak_rss_mib": 1.0, "peak_pss_mib": 1.0}
    return {**dict.fromkeys(keys, 1.0), **memory, "steps_per_second": steps_per_second, **other}


def test_ratios_are_taken_within_a_repeat() -> None:
    # A machine that slows to a half in the second repeat changes no ratio: 2, 2 and 4, median 2.
    rows = [
        {"seedbed": row(2000), "rllib": row(1000, driver_cpu_s=3.0)},
        {"seedbed": row(1000), "rllib": row(500, driver_cpu_s=3.0)},
        {"seedbed": row(4000), "rllib": row(1000, driver_cpu_s=3.0)},
    ]
    found = summarize(rows, [4000.0, 2000.0, 4000.0], ["seedbed", "rllib"])
    assert found["ratios"]["seedbed / rllib"] == 2.0
    assert found["ratios"]["rllib CPU / seedbed CPU"] == 3.0
    assert found["ratios"]["seedbed / bare environment"] == 0.5
    assert found["arms"]["seedbed"]["steps_per_second"] == 2000
    assert "| seedbed | 2,000 |" in table("a setting", found)


def test_memory_counts_the_children() -> None:
    alone = tree_mib(os.getpid())[0]
    hungry = "import time; x = bytearray(200 * 1024**2); print(flush=True); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-c", hungry], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        rss, pss = tree_mib(os.getpid())
    finally:
        child.kill()
        child.communicate()
    assert 200 < rss - alone < 260
    assert pss <= rss
