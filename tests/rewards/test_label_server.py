"""The page's server over real connections: what it gives, what it takes, and what it refuses."""

from __future__ import annotations

import http.client
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from rewards.label_queue import LabelQueue
from rewards.label_server import MAX_BODY, LabelServer, is_local
from tests.rewards.test_label_queue import A, B, queue

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[LabelQueue, LabelServer]]:
    q = queue(tmp_path, A, B, steps=[0, 5, 10])
    (tmp_path / "clips" / A / "00001.jpg").write_bytes(b"jpeg")
    server = LabelServer(q, port=0)
    yield q, server
    server.stop()


def ask(server: LabelServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def post(server: LabelServer, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    status, text = ask(server, "POST", path, body, **{"Content_Type": "application/json", **headers})
    return status, json.loads(text)


def test_the_queue_and_the_answers(served: tuple[LabelQueue, LabelServer]) -> None:
    q, server = served
    state = json.loads(ask(server, "GET", "/queue")[1])
    assert state == {
        "left": [{"clip": A, "steps": [0, 5, 10]}, {"clip": B, "steps": [0, 5, 10]}],
        "total": 2,
        "labels": 0,
        "undo": False,
    }
    status, state = post(server, "/answer", {"clip": A, "label": "unsafe", "step": 5})
    assert (status, [c["clip"] for c in state["left"]], state["labels"], state["undo"]) == (200, [B], 1, True)
    assert q.answers()[A].step == 5
    status, state = post(server, "/undo", {})
    assert (status, len(state["left"])) == (200, 2)


def test_the_page_and_its_pictures(served: tuple[LabelQueue, LabelServer]) -> None:
    _, server = served
    status, page = ask(server, "GET", "/")
    assert status == 200
    assert b"Did this episode stay safe?" in page
    assert ask(server, "GET", "/page.js")[0] == 200
    assert ask(server, "GET", f"/clip/{A}/1") == (200, b"jpeg")


@pytest.mark.parametrize(
    "path",
    [
        f"/clip/{A}/7",
        f"/clip/{'c' * 20}/1",
        "/clip/../../answers.jsonl",
        f"/clip/{A}/../../../config.json",
        "/clip/..%2f..%2fconfig/1",
        "/answers.jsonl",
        "/token",
        "//etc/passwd",
    ],
)
def test_nothing_else_is_given(served: tuple[LabelQueue, LabelServer], path: str) -> None:
    (served[0].folder.parent / "config.json").write_text("secret")
    assert ask(served[1], "GET", path)[0] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"clip": "c" * 20, "label": "safe"}, 409),
        ({"clip": A, "label": "maybe"}, 409),
        ({"clip": A, "label": "unsafe", "step": 3}, 409),
        ({"clip": A}, 400),
        ([1], 400),
        (b"{", 400),
        (b"", 400),
    ],
)
def test_what_is_no_answer(served: tuple[LabelQueue, LabelServer], body: Any, status: int) -> None:
    q, server = served
    found, answer = post(server, "/answer", body)
    assert found == status
    assert answer["error"]
    assert q.pending() == [A, B]


def test_a_large_body_is_not_read(served: tuple[LabelQueue, LabelServer]) -> None:
    _, server = served
    assert post(server, "/answer", b" " * (MAX_BODY + 1))[0] == 413
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", "/answer")
    for name, value in {**JSON, "Content-Length": str(10**12)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_another_site_cannot_answer(served: tuple[LabelQueue, LabelServer]) -> None:
    """A form of another site sends no JSON; a name of another site that leads here is not this machine's."""
    q, server = served
    body = {"clip": A, "label": "safe"}
    assert post(server, "/answer", body, Content_Type="text/plain")[0] == 415
    assert post(server, "/answer", body, Content_Type="application/x-www-form-urlencoded")[0] == 415
    assert post(server, "/answer", body, Host="evil.example:80")[0] == 403
    assert ask(server, "GET", "/queue", Host="evil.example")[0] == 403
    assert q.pending() == [A, B]
    assert post(server, "/answer", body, Host=f"localhost:{server.port}")[0] == 200


def test_on_another_address_the_token_is_needed(tmp_path: Path) -> None:
    q = queue(tmp_path, A, steps=[0, 1])
    server = LabelServer(q, host="0.0.0.0", port=0)
    try:
        token = (tmp_path / "token").read_text()
        assert server.url.endswith(f":{server.port}/?token={token}")
        assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
        body = {"clip": A, "label": "safe"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {token}x"}):
            assert ask(server, "GET", "/queue", **headers)[0] == 401
            assert ask(server, "GET", f"/clip/{A}/0", **headers)[0] == 401
            assert post(server, "/answer", body, **headers)[0] == 401
        assert q.pending() == [A]
        assert post(server, "/answer", body, Authorization=f"Bearer {token}")[0] == 200
    finally:
        server.stop()
    again = LabelServer(q, host="0.0.0.0", port=0)  # after a restart the link still works
    assert again.token == token
    again.stop()


def test_an_address_that_cannot_be_had(served: tuple[LabelQueue, LabelServer]) -> None:
    q, server = served
    for host, port in (("127.0.0.1", server.port), ("no-such-host.invalid", 0)):
        with pytest.raises(UserError, match="the page for labels cannot be served") as caught:
            LabelServer(q, host, port)
        assert "algo.human.port" in str(caught.value)


def test_what_is_local() -> None:
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1", "127.3.2.1")))
    assert not any(map(is_local, ("0.0.0.0", "10.0.0.1", "example.org", "", "127.0.0.1.example.org")))
