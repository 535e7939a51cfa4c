"""Commands run as a user runs them, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """`command("train", "algo=ppo", ...)` in an empty folder; keywords are environment variables."""

    def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
        line = [sys.executable, str(CHECKOUT / "launch" / f"{script}.py"), *arguments]
        return subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)

    return run
