"""How Ray is started: the token it gets. With a real Ray: tests/launch/test_ray.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from trainers import ray_cluster
from trainers.ray_cluster import (
    CHECKOUT,
    check_address,
    daemons,
    deaf_children,
    local_cluster,
    lost_daemon,
    ray_environment,
    wait_for_cpus,
)


def test_the_token_is_random_and_what_the_user_set_is_kept(tmp_path: Path) -> None:
    first, second = ray_environment({}, tmp_path), ray_environment({}, tmp_path)
    assert first.keys() == {"RAY_AUTH_TOKEN"}
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first != second
    assert ray_environment({"RAY_AUTH_MODE": "token"}, tmp_path).keys() == {"RAY_AUTH_TOKEN"}
    for theirs in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        assert ray_environment({theirs: "x"}, tmp_path) == {}
    assert ray_environment({"RAY_AUTH_MODE": "disabled"}, tmp_path) == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("mine")
    assert ray_environment({}, tmp_path) == {}


def test_an_address_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_address(address)
        check_address(f"ray://{address}")
    with pytest.raises(UserError, match="no Ray cluster answers") as error:
        check_address(address)
    assert f"RAY_ADDRESS={address}" in str(error.value)
    check_address("auto")


def test_a_cluster_without_enough_free_cpus(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "FREE_CPUS_S", 1)
    wait_for_cpus(0)
    wait_for_cpus(4)
    with pytest.raises(UserError, match="had not 5 free CPUs within 1 s") as error:
        wait_for_cpus(5)
    assert "allowed: it has 4 in all" in str(error.value)


def test_rays_own_processes_are_found(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no public part of Ray: another release may hide them."""
    found = daemons()
    assert {"raylet", "gcs_server"} <= found.keys()
    for kind in ("raylet", "gcs_server"):
        assert kind in Path(f"/proc/{found[kind].pid}/cmdline").read_text()
    assert lost_daemon() is None
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as gone:
        gone.wait()
    monkeypatch.setattr(ray_cluster, "daemons", lambda: found | {"gcs_server": gone, "monitor": gone})
    assert lost_daemon() == f"gcs_server (process {gone.pid}) ended with code 3"


def test_nothing_of_a_cluster_outlives_it() -> None:
    """The raylet's agents would hold a port for half a minute, for which the next cluster waits."""
    code = """if True:
        from trainers.ray_cluster import children, daemons, local_cluster
        with local_cluster(1):
            print(*(pid for process in daemons().values() for pid in (process.pid, *children(process.pid))))
    """
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=CHECKOUT
    )
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) > len(("gcs_server", "raylet", "dashboard agent", "runtime env agent"))
    limit = time.monotonic() + 10
    while alive := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < limit, alive
        time.sleep(0.1)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_children_that_do_not_hear_signals_of_which_their_parent_does() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    code = "import time; print('up', flush=True); time.sleep(60)"
    try:
        with deaf_children():
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 10
            while not heard and time.monotonic() < deadline:
                time.sleep(0.01)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.terminate()
    time.sleep(0.2)
    assert child.poll() is None
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        other.terminate()
        assert other.wait() == -signal.SIGTERM, "only those started inside"


def test_a_machine_too_busy_to_start_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray 2.60 says when its raylet needs more than 30 s; anything else is not dressed up."""
    import ray

    def times_out(**options: Any) -> None:
        raise Exception(f"The current node {said} during startup. This could happen because ...")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", times_out)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_worker_niceness", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    said = "timed out"
    with pytest.raises(UserError, match=r"(?s)not up within 30 s.*load average"), local_cluster(1):
        pass
    said = "was lost"
    with pytest.raises(Exception, match="was lost during startup"), local_cluster(1):
        pass
