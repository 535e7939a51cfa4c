"""Checks before any work: packages, the rooms on the search path, CPUs, memory, disk, permissions.

Each check is a function of what is asked and what is there; it returns a line that says so, or raises
UserError. Reads the machine, writes nothing, imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

from envs.errors import UserError

CHECKOUT = Path(__file__).resolve().parent.parent
ROOMS = ("envs", "rollouts", "rewards", "trainers", "algos", "evaluators", "stages", "launch")
RUN_GIB = 0.25  # metrics, curves, a video and the checkpoints of a small network
CGROUP = Path("/sys/fs/cgroup")
NO_DEPS = "pip install --no-deps -r constraints/no-deps.txt"
WORKERS = "rollout.num_env_runners"


def install(extra: str) -> str:
    """The command that installs an optional dependency."""
    line = f"pip install -c constraints/cpu.txt '.[{extra}]'"
    return f"make install, or: {line} && {NO_DEPS}" if extra == "safety" else f"make install, or: {line}"


def check_packages(
    requirements: Iterable[str],
    installed: Callable[[str], str] = metadata.version,
    fix: str = install("safety"),
) -> str:
    """Every requirement (`name[extras]>=1,<2`) is met by an installed distribution."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        raise UserError("packages are missing", given="packaging is not installed", fix=fix) from None
    wrong, found = [], []
    for requirement in map(Requirement, requirements):
        try:
            version = installed(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        raise UserError("packages are missing or of another version:\n    " + "\n    ".join(wrong), fix=fix)
    return f"packages: {', '.join(found)}"


def check_python(allowed: str, version: str | None = None) -> str:
    """The interpreter's version is in the range that pyproject.toml gives."""
    from packaging.specifiers import SpecifierSet

    version = version or platform.python_version()
    if not SpecifierSet(allowed).contains(version, prereleases=True):
        raise UserError("this Python is not supported", given=version, allowed=allowed, fix="make install")
    return f"python: {version}"


def check_rooms(rooms: Iterable[str] = ROOMS, checkout: Path = CHECKOUT) -> str:
    """Every room that the checkout has is the package that an import would find."""
    for room in rooms:
        if not (checkout / room).is_dir():
            continue
        spec = importlib.util.find_spec(room)
        places = [Path(p).resolve() for p in (spec.submodule_search_locations or [])] if spec else []
        if checkout / room not in places[:1]:
            where = places[0] if places else (spec.origin if spec else "nowhere")
            raise UserError(
                f"another package called '{room}' comes before this checkout's",
                given=str(where),
                allowed=str(checkout / room),
                fix=f"uninstall it, or take its folder off PYTHONPATH; rooms are {', '.join(ROOMS)}",
            )
    return f"rooms: imported from {checkout}"


def check_cpus(asked: int, there: int, setting: str = WORKERS) -> str:
    """No more processes work at the same time than there are CPUs; `setting` says how many."""
    if asked > there:
        several = " and " in setting
        raise UserError(
            "more workers than CPUs",
            given=f"{asked} workers ({setting})",
            allowed=f"at most {there}, the CPUs that this process may use",
            fix=f"lower {setting}; 0 works in the main process"
            if several
            else f"{setting}={there}, or 0 to sample in the main process",
        )
    return f"cpus: {asked} of {there}"


def check_memory(asked_gib: float, there_gib: float, setting: str = WORKERS) -> str:
    """The estimated memory is there."""
    if asked_gib > there_gib:
        raise UserError(
            "not enough free memory",
            given=f"about {asked_gib:.1f} GiB needed, {there_gib:.1f} GiB free",
            fix=f"close other programs, or lower {setting}",
        )
    return f"memory: about {asked_gib:.1f} of {there_gib:.1f} GiB free"


def check_disk(folder: Path, asked_gib: float, free_gib: float) -> str:
    """The run's files fit on the disk that holds `folder`."""
    if asked_gib > free_gib:
        raise UserError(
            f"the disk that holds {folder} is full",
            given=f"{free_gib:.2f} GiB free, about {asked_gib:.2f} GiB needed for checkpoints and reports",
            fix="delete old runs, or choose another place with run.dir=<folder>",
        )
    return f"disk: about {asked_gib:.2f} of {free_gib:.1f} GiB free for {folder}"


def check_writable(folder: Path) -> str:
    """`folder` is, or can become, a folder in which this process may create files."""
    there = _existing(folder)
    if not there.is_dir():
        raise UserError(
            f"{folder} can't be made", given=f"{there} is a file", fix="choose another run.dir=<folder>"
        )
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise UserError(
            f"no permission to write into {folder}",
            given=f"{there} is not writable for this user",
            fix="run.dir=<a folder of your own>",
        )
    return f"run directory: {folder} is writable"


def cpus() -> int:
    """CPUs that this process may use: its affinity, cut by the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        count = min(count, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return count


def free_memory_gib() -> float:
    """Memory that can still be had: the machine's, cut by the container's limit."""
    free = math.inf
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        cache = [int(v) for k, v in _pairs(_read(CGROUP / "memory.stat")) if k == "inactive_file"]
        free = min(free, int(limit) - int(used) + sum(cache))
    return free / 2**30


def free_disk_gib(folder: Path) -> float:
    """Free space on the disk that holds `folder`, or would hold it."""
    return shutil.disk_usage(_existing(folder)).free / 2**30


def project(checkout: Path = CHECKOUT) -> dict:
    """The [project] table of pyproject.toml."""
    return tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def check_installation() -> list[str]:
    """Python, the packages every run needs, and the rooms. Before anything else is imported."""
    about = project()
    packages = check_packages(about["dependencies"])
    return [check_python(about["requires-python"]), packages, check_rooms()]


def check_extras(names: Iterable[str]) -> list[str]:
    """The packages of optional dependencies (extras of pyproject.toml) that a run needs."""
    lines = []
    for name in names:
        wanted = list(project()["optional-dependencies"][name])
        if name == "safety":
            unpinned = (CHECKOUT / "constraints" / "no-deps.txt").read_text().splitlines()
            wanted += [line for line in unpinned if line and not line.startswith("#")]
        lines.append(check_packages(wanted, fix=install(name)))
    return lines


def check_machine(
    resources: Mapping[str, float], runs_dir: Path, environ: Mapping[str, str], workers: str = WORKERS
) -> list[str]:
    """What a run asks for against what this machine has; CPUs and memory of a cluster are Ray's matter.

    workers: the settings that say how many processes there are.
    """
    lines = []
    if not environ.get("RAY_ADDRESS"):
        lines.append(check_cpus(int(resources["cpus"]), cpus(), workers))
        lines.append(check_memory(resources["memory_gib"], free_memory_gib(), workers))
    lines.append(check_writable(runs_dir))
    lines.append(check_disk(runs_dir, RUN_GIB, free_disk_gib(runs_dir)))
    return lines


def _existing(folder: Path) -> Path:
    """`folder` or the nearest folder above it that exists."""
    folder = folder.absolute()
    while not os.path.exists(folder) and folder != folder.parent:  # Path.exists raises without permission
        folder = folder.parent
    return folder


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(k, v) for k, _, v in (line.partition(" ") for line in text.splitlines())]
