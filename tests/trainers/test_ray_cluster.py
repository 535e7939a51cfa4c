"""How Ray is started: the token it gets. With a real Ray: tests/launch/test_ray.py."""

from __future__ import annotations

from pathlib import Path

from trainers.ray_cluster import ray_environment


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
