"""Real disks for the tests of what happens when one is full or read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, mounted for the test."""
    place = tmp_path / "small-disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine lets nobody mount: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
