"""Hydra's -m over one Ray cluster: every combination is a run in a process of its own, several at a time.

    python launch/train.py -m hydra/launcher=ray hydra.launcher.name=rates \
        algo=ppo_lag run.seed=1,2,3 learner.lr=3e-4,1e-3 rollout.num_env_runners=0

Runs lie in runs/<name>/; those that are done are not repeated, those that were stopped go on, and a table
over seeds is written at the end: table.md and results.json. A run takes `cpus_per_run` of the cluster that
RAY_ADDRESS names, or of one started here; with fractions more runs than CPUs work side by side.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from envs.errors import UserError

CHECKOUT = Path(__file__).resolve().parent.parent
PLUGIN = "hydra_plugins.seedbed"
STOP_S = 60  # for runs to write their checkpoints when the sweep is interrupted
# Ray describes its own worker in these; a run that such a worker starts is a driver of its own.
WORKERS_OWN = re.compile(r"RAY_(JOB_ID|RAYLET_|NODE_|WORKER_|SESSION_|LD_PRELOAD|CLIENT_)")


@dataclass
class RaySweepConfig:
    """hydra.launcher: how a sweep is spread. `dir` is where the sweep's folder lies."""

    _target_: str = f"{PLUGIN}.RaySweep"
    name: str = "sweep"
    cpus_per_run: float = 1.0
    dir: str = "runs"


class RaySweep(Launcher):
    """Hydra's launcher for `hydra/launcher=ray`."""

    def __init__(self, name: str, cpus_per_run: float, dir: str) -> None:
        self.name, self.cpus_per_run, self.dir = name, cpus_per_run, dir

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Nothing of Hydra's own is needed: every run composes its config itself."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run what is missing, write the table; exits the process with 1 if a run failed."""
        try:
            failed = sweep(self.name, Path(self.dir), job_overrides, self.cpus_per_run)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        if failed:
            sys.exit(1)
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=0) for _ in job_overrides]


RaySweep.__module__ = PLUGIN


def register() -> None:
    """Make `hydra/launcher=ray` known to Hydra, which takes launchers only from under `hydra_plugins`."""
    plugins = Plugins.instance()  # looks for installed ones
    above = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    sys.modules[PLUGIN] = sys.modules[__name__]
    setattr(above, PLUGIN.rpartition(".")[2], sys.modules[__name__])
    plugins.register(RaySweep)
    ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RaySweepConfig, provider="seedbed")


def run_names(job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """A folder's name for every job, from the settings in which the jobs differ."""
    jobs = [dict(_split(o) for o in overrides) for overrides in job_overrides]
    varying = [key for key in jobs[0] if len({job.get(key) for job in jobs}) > 1]
    plain = re.compile(r"[^\w.+-]")
    names = [
        "_".join(f"{key.rpartition('.')[2]}-{plain.sub('', job[key])}" for key in varying) or "run"
        for job in jobs
    ]
    return [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]


def sweep(name: str, folder: Path, job_overrides: Sequence[Sequence[str]], cpus_per_run: float) -> list[str]:
    """Train every combination that is not done; the names of those that failed. Raises UserError."""
    from evaluators.sweep import write_sweep
    from launch import preflight

    if not cpus_per_run > 0:
        raise UserError("a run needs a share of a CPU", given=f"hydra.launcher.cpus_per_run={cpus_per_run}")
    if "/" in name or name in ("", ".", ".."):
        raise UserError("hydra.launcher.name must be the name of one folder", given=name)
    place = (folder / name).absolute()
    place.mkdir(parents=True, exist_ok=True)
    preflight.check_writable(place)
    names = run_names(job_overrides)
    jobs = {n: dict(_split(o) for o in job) for n, job in zip(names, job_overrides, strict=True)}
    (place / "sweep.json").write_text(json.dumps(jobs, indent=2) + "\n")
    todo = {n: list(job) for n, job in zip(names, job_overrides, strict=True) if not done(place / n)}
    print(f"{place}: {len(jobs)} runs, {len(jobs) - len(todo)} of them done already", flush=True)
    codes = _over_ray(place, todo, cpus_per_run) if todo else {}
    rows = write_sweep(place)
    print(f"\n{(place / 'table.md').read_text()}\n{len(rows)} runs in {place}: table.md, results.json")
    failed = [n for n, code in codes.items() if code]
    for n in failed:
        print(f"failed: {n} (exit code {codes[n]}), see {place / f'{n}.log'}", file=sys.stderr)
    return failed


def done(path: Path) -> bool:
    """Whether a run has finished and been evaluated."""
    try:
        status = json.loads((path / "status.json").read_text())["status"]
    except (OSError, ValueError, KeyError):
        return False
    return status == "finished" and (path / "evaluation.json").exists()


def command(place: Path, name: str, overrides: Sequence[str]) -> list[str]:
    """The command of one run: taken up again if it was begun."""
    train = [sys.executable, str(CHECKOUT / "launch" / "train.py")]
    where = [f"run.dir={place}", "run.display=plain"]
    if (place / name / "config.json").exists():
        return [*train, f"resume={name}", *where]
    return [*train, *overrides, f"run.name={name}", *where]


def _over_ray(place: Path, todo: dict[str, list[str]], cpus_per_run: float) -> dict[str, int]:
    """Exit codes of the runs, each a task on the cluster."""
    import ray

    from launch.preflight import cpus
    from trainers.ray_cluster import local_cluster

    codes: dict[str, int] = {}
    with local_cluster(cpus()):
        address = ray.get_runtime_context().gcs_address
        there = ray.cluster_resources().get("CPU", 0.0)
        if cpus_per_run > there:
            raise UserError(
                "a run asks for more CPUs than the cluster has",
                given=f"hydra.launcher.cpus_per_run={cpus_per_run:g}",
                allowed=f"at most {there:g}",
            )
        start = ray.remote(num_cpus=cpus_per_run, max_retries=0)(_run)
        tasks = {start.remote(command(place, n, todo[n]), str(place / f"{n}.log"), address): n for n in todo}
        try:
            while tasks:
                ready, _ = ray.wait(list(tasks), num_returns=1)
                name = tasks.pop(ready[0])
                try:
                    codes[name] = ray.get(ready[0])
                except ray.exceptions.RayError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    codes[name] = 1
                print(f"{name}: {'done' if codes[name] == 0 else 'failed'}, {len(tasks)} left", flush=True)
        except KeyboardInterrupt:
            print("stopping the runs; the same command goes on where they were", file=sys.stderr, flush=True)
            for task in tasks:
                ray.cancel(task)
            ray.wait(list(tasks), num_returns=len(tasks), timeout=STOP_S)
            raise
    return codes


def _run(command: list[str], log: str, address: str) -> int:
    """One run, on a worker: a process that joins the same cluster; its exit code.

    A cancelled one gets SIGTERM and the time to write its checkpoint.
    """
    environ = {k: v for k, v in os.environ.items() if not WORKERS_OWN.match(k)} | {"RAY_ADDRESS": address}
    with open(log, "a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
        try:
            while process.poll() is None:
                time.sleep(0.2)  # not wait(): Ray's interrupt would not end it
            return process.returncode
        except KeyboardInterrupt:
            process.terminate()
            return process.wait(timeout=STOP_S)
        finally:
            process.kill()


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value
