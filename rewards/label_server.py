"""The page on which people label: a small HTTP server over a label queue, on this machine only by default.

Nothing is served but the page's two files and the frames of clips that are waited for, and nothing is written
but answers. Without a token only requests to this machine's own names are taken; on any other address the
token is needed. Posts must be JSON, so no other site's form can send one, and small.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from envs.errors import UserError
from rewards.label_queue import CLIP_ID, LabelQueue
from rollouts.clips import clip_steps

PAGE = Path(__file__).resolve().parent / "label_page"
MAX_BODY = 4096
STATIC = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript")}
POLICY = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src blob:; connect-src 'self'"


class LabelServer:
    """Serves the queue from a thread until `stop`. `url` is where a browser finds it.

    Raises UserError when the address cannot be had.
    """

    def __init__(self, queue: LabelQueue, host: str = "127.0.0.1", port: int = 8765) -> None:
        self.token = None if is_local(host) else _token(queue.folder)
        handler = type("Handler", (_Handler,), {"queue": queue, "token": self.token})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"the page for labels cannot be served: {error}",
                given=f"{host}:{port}",
                fix="choose another algo.human.port (0 takes any free one), or another algo.human.host",
            ) from error
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        query = f"/?token={self.token}" if self.token else "/"
        shown = socket.gethostname() if host in ("0.0.0.0", "") else host
        self.url = f"http://{shown}:{self.port}{query}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="label-page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the page; the queue stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(folder: Path) -> str:
    """The folder's token, made once, so that a link still works after a restart."""
    path = folder / "token"
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(24)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


class _Handler(BaseHTTPRequestHandler):
    queue: LabelQueue
    token: str | None
    server_version, sys_version = "seedbed", ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in STATIC and self._from_here():
            name, kind = STATIC[path]
            self._send(HTTPStatus.OK, (PAGE / name).read_bytes(), f"{kind}; charset=utf-8")
        elif not self._allowed():
            return
        elif path == "/queue":
            self._json(HTTPStatus.OK, self._state())
        else:
            self._frame(path)

    def do_POST(self) -> None:
        if not self._allowed():
            return
        if self.headers.get_content_type() != "application/json":
            self._json(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "JSON only"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            self.close_connection = True
            self._json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"at most {MAX_BODY} bytes"})
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
            if self.path == "/answer":
                self.queue.answer(str(body["clip"]), str(body["label"]), body.get("step"))
            elif self.path == "/undo":
                self.queue.undo()
            else:
                self._json(HTTPStatus.NOT_FOUND, {"error": "no such page"})
                return
        except UserError as error:
            self._json(HTTPStatus.CONFLICT, {"error": error.what, **self._state()})
        except (ValueError, KeyError, TypeError, AttributeError):
            self._json(HTTPStatus.BAD_REQUEST, {"error": "not an answer"})
        else:
            self._json(HTTPStatus.OK, self._state())

    def _state(self) -> dict[str, Any]:
        """What the page shows: the clips that are left, how many were asked for, and all labels so far."""
        batch, answers, folder = self.queue.batch(), self.queue.answers(), self.queue.folder
        left = [clip for clip in batch if clip not in answers]
        return {
            "left": [{"clip": clip, "steps": clip_steps(folder, clip)} for clip in left],
            "total": len(batch),
            "labels": sum(a.label != "skip" for a in answers.values()),
            "undo": self.queue.last() is not None,
        }

    def _frame(self, path: str) -> None:
        parts = path.split("/")  # /clip/<id>/<number>
        ok = len(parts) == 4 and parts[1] == "clip" and CLIP_ID.fullmatch(parts[2]) and parts[3].isdigit()
        if ok and len(parts[3]) < 6 and parts[2] in self.queue.batch():
            file = self.queue.folder / "clips" / parts[2] / f"{int(parts[3]):05d}.jpg"
            with contextlib.suppress(OSError):
                self._send(HTTPStatus.OK, file.read_bytes(), "image/jpeg")
                return
        self._json(HTTPStatus.NOT_FOUND, {"error": "no such picture"})

    def _from_here(self) -> bool:
        """Without a token the browser must mean this machine, not a name of another site that leads here."""
        host = self.headers.get("Host", "")
        name = (host.rpartition(":")[0] or host).strip("[]")
        if self.token is not None or is_local(name):
            return True
        self._json(HTTPStatus.FORBIDDEN, {"error": "not from here"})
        return False

    def _allowed(self) -> bool:
        if not self._from_here():
            return False
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.token is None or hmac.compare_digest(given.encode(), self.token.encode()):
            return True
        self._json(HTTPStatus.UNAUTHORIZED, {"error": "the token is missing or wrong"})
        return False

    def _json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        if status >= 400:
            self.close_connection = True  # a body that was not read must not be taken for the next request
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **({"Connection": "close"} if status >= 400 else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The run's own display is on this terminal."""
