"""How Ray is started: the token it gets. With a real Ray: tests/launch/test_ray.py."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from trainers import ray_cluster
from trainers.ray_cluster import check_address, ray_environment, wait_for_cpus


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
