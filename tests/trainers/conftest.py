"""Real disks for the tests of what happens when one is full or read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A small file system at `place`; skips the test where nobody may mount one."""
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine lets nobody mount: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "small-disk", "size=1m") as place:
        yield place


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that nobody may write, root neither."""
    with mounted(tmp_path / "read-only-disk", "size=1m,ro") as place:
        yield place
