"""Shared by all tests: one thread per process, a Ray token that is ours, and one small Ray per session."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports numpy or torch, and inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = str(ROOT)
# Without a token of its own Ray writes one into the user's home.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """A local Ray with four logical CPUs, started once for all tests that ask for it."""
    import ray

    if not ray.is_initialized():
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=256 * 1024**2,
            logging_level="warning",
            log_to_driver=False,
        )
    yield ray
    ray.shutdown()
