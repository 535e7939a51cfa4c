"""Each check before a run, with the message it refuses with."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from envs.errors import UserError
from launch import preflight


def refusal(check, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


def test_more_workers_than_cpus() -> None:
    assert preflight.check_cpus(2, 2) == "cpus: 2 of 2"
    message = refusal(preflight.check_cpus, 8, 2)
    assert "more workers than CPUs" in message
    assert "8 workers" in message
    assert "at most 2" in message
    assert "fix:     rollout.num_env_runners=2" in message


def test_memory() -> None:
    assert preflight.check_memory(2.7, 4.0) == "memory: about 2.7 of 4.0 GiB free"
    message = refusal(preflight.check_memory, 2.7, 1.5)
    assert "not enough free memory" in message
    assert "2.7 GiB needed, 1.5 GiB free" in message
    assert "rollout.num_env_runners" in message


def test_full_disk() -> None:
    assert "0.25 of 10.0 GiB" in preflight.check_disk(Path("runs"), 0.25, 10.0)
    message = refusal(preflight.check_disk, Path("runs"), 0.25, 0.1)
    assert "the disk that holds runs is full" in message
    assert "0.10 GiB free, about 0.25 GiB needed" in message
    assert "run.dir=<folder>" in message


def test_no_write_permission(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    user = os.geteuid()
    try:
        if user == 0:  # root may write anywhere
            os.seteuid(65534)
        message = refusal(preflight.check_writable, locked / "runs")
    finally:
        os.seteuid(user)
    assert f"no permission to write into {locked / 'runs'}" in message
    assert "run.dir=" in message


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    message = refusal(preflight.check_writable, tmp_path / "runs" / "deep")
    assert f"{tmp_path / 'runs'} is a file" in message


def test_a_folder_that_will_be_made_is_not_made(tmp_path: Path) -> None:
    assert "writable" in preflight.check_writable(tmp_path / "a" / "b")
    assert preflight.free_disk_gib(tmp_path / "a" / "b") > 0
    assert not (tmp_path / "a").exists()


def installed(versions: dict[str, str]):
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


def test_packages() -> None:
    there = installed({"ray": "2.60.0", "gymnasium": "0.29.1"})
    assert "ray 2.60.0" in preflight.check_packages(["ray[rllib]>=2.55,<3"], there)
    message = refusal(
        preflight.check_packages,
        ["ray[rllib]>=2.55,<3", "gymnasium>=1.2,<2", "safety-gymnasium==1.0.0"],
        there,
    )
    assert "gymnasium 0.29.1 is not <2,>=1.2" in message
    assert "safety-gymnasium is not installed" in message
    assert "ray 2.60.0" not in message
    assert "make install" in message
    assert "pip install --no-deps -r constraints/no-deps.txt" in message


def test_local_builds_are_in_range() -> None:
    assert preflight.check_packages(["torch>=2.10,<2.16"], installed({"torch": "2.13.0+cpu"}))


def test_python() -> None:
    assert preflight.check_python(">=3.11,<3.13", "3.11.7") == "python: 3.11.7"
    message = refusal(preflight.check_python, ">=3.11,<3.13", "3.10.2")
    assert "3.10.2" in message
    assert ">=3.11,<3.13" in message


def test_this_installation_passes() -> None:
    assert len(preflight.check_installation()) == 3
    assert "safety-gymnasium 1.0.0" in preflight.check_extras(["safety"])[0]
    assert preflight.check_extras([]) == []


@pytest.mark.parametrize("ours_is_first", [True, False])
def test_another_package_called_like_a_room(
    ours_is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("ours", "theirs"):
        (tmp_path / place / "room_x").mkdir(parents=True)
        (tmp_path / place / "room_x" / "__init__.py").write_text("")
    order = ["ours", "theirs"] if ours_is_first else ["theirs", "ours"]
    monkeypatch.setattr(sys, "path", [str(tmp_path / place) for place in order])
    if ours_is_first:
        assert "rooms" in preflight.check_rooms(["room_x", "room_absent"], tmp_path / "ours")
    else:
        message = refusal(preflight.check_rooms, ["room_x"], tmp_path / "ours")
        assert "another package called 'room_x'" in message
        assert str(tmp_path / "theirs" / "room_x") in message
        assert "PYTHONPATH" in message


def test_a_room_without_init_loses_to_a_package_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours" / "room_y").mkdir(parents=True)
    (tmp_path / "theirs" / "room_y").mkdir(parents=True)
    (tmp_path / "theirs" / "room_y" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "ours"), str(tmp_path / "theirs")])
    assert "room_y" in refusal(preflight.check_rooms, ["room_y"], tmp_path / "ours")


def test_containers_limit_cpus_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    machine_cpus, machine_gib = preflight.cpus(), preflight.free_memory_gib()
    assert machine_cpus >= 1
    assert machine_gib > 0.1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{100 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{60 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {10 * 2**20}\n")
    assert preflight.cpus() == 1
    assert preflight.free_memory_gib() == pytest.approx(50 / 1024)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.cpus() == machine_cpus
    assert preflight.free_memory_gib() > 50 / 1024


def test_a_cluster_of_its_own_has_its_own_cpus(tmp_path: Path) -> None:
    asked = {"cpus": 10_000, "memory_gib": 1e6}
    assert "more workers than CPUs" in refusal(preflight.check_machine, asked, tmp_path, {})
    lines = preflight.check_machine(asked, tmp_path, {"RAY_ADDRESS": "head:6379"})
    assert [line.partition(":")[0] for line in lines] == ["run directory", "disk"]
