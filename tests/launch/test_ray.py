"""With a real Ray: what it writes, what its workers import, and a run that is stopped and taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import CHECKOUT, Command

# What launch/train.py does to its process, then a task that tells what it finds on a worker.
PROBE = """
import json, runpy, sys
train = sys.argv[1]
sys.argv, sys.path[0] = [train], train.rpartition("/")[0]
runpy.run_path(train, run_name="launcher")
from trainers.ray_cluster import local_cluster
with local_cluster(1):
    import ray

    @ray.remote
    def look():
        import envs, os, ray._raylet, sys
        return {
            "envs": envs.__file__,
            "path": sys.path,
            "authenticates": ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN,
            "token": len(os.environ["RAY_AUTH_TOKEN"]),
            "threads": os.environ["OMP_NUM_THREADS"],
            "nice": os.nice(0),
        }

    print(json.dumps(ray.get(look.remote())))
"""


def environment(**variables: str) -> dict[str, str]:
    unset = ("PYTHONPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
    return {k: v for k, v in os.environ.items() if k not in unset} | variables


def test_ray_writes_nothing_into_the_home_and_workers_import_this_checkout(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    (elsewhere / "envs").mkdir(parents=True)
    (elsewhere / "envs" / "__init__.py").write_text("raise ImportError('the wrong envs')")
    script = elsewhere / "probe.py"
    script.write_text(PROBE)
    out = subprocess.run(
        [sys.executable, str(script), str(CHECKOUT / "launch" / "train.py")],
        cwd=elsewhere,
        env=environment(HOME=str(home)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout.splitlines()[-1])
    assert found["envs"] == str(CHECKOUT / "envs" / "__init__.py")
    assert found["path"][0] == str(CHECKOUT)
    assert not {str(CHECKOUT / "launch"), str(elsewhere)} & set(found["path"])
    assert found["authenticates"]
    assert (found["token"], found["threads"]) == (64, "1")
    assert found["nice"] == os.nice(0)
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_sigterm_then_resume_then_evaluate(command: Command, tmp_path: Path) -> None:
    """The user's whole way: train, stop by SIGTERM, continue with the printed command, evaluate again."""
    line = [sys.executable, str(CHECKOUT / "launch" / "train.py"), "algo=ppo", "run.name=mine"]
    line += ["env.horizon=50", "rollout.env_steps=80_000_000", "rollout.num_env_runners=1"]
    process = subprocess.Popen(
        line, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "continue with: python launch/train.py resume=mine" in said
    steps = [json.loads(row)["step"] for row in metrics.read_text().splitlines()]
    last = steps[-1]

    out = command("train", "resume=mine", f"run.max_steps={last + 2}")
    assert out.returncode == 0, out.stderr
    assert "violation rate" in out.stdout
    steps = [json.loads(row)["step"] for row in metrics.read_text().splitlines()]
    assert steps == list(range(1, last + 3))
    assert json.loads((metrics.parent / "status.json").read_text())["status"] == "finished"
    for name in ("report.html", "evaluation.json", "notes.json", "config.json"):
        assert (metrics.parent / name).stat().st_size > 0

    assert "is finished" in command("train", "resume=mine", f"run.max_steps={last + 2}").stdout
    out = command("evaluate", "run=mine", "episodes=3", "video=false")
    assert out.returncode == 0, out.stderr
    result = json.loads((metrics.parent / "evaluation.json").read_text())
    assert result["episode_return"]["n"] == 3
    assert result["checkpoint_step"] == last + 2
