"""A real headless browser, driven over its debugging protocol: pages, keys, and what they show."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# key -> (code, Windows virtual key code), as a keyboard sends them
SPECIAL = {"ArrowLeft": ("ArrowLeft", 37), "ArrowRight": ("ArrowRight", 39), " ": ("Space", 32)}


def find_browser() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with a profile of its own."""

    def __init__(self, program: str, profile: Path):
        self.process = subprocess.Popen(
            [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.port = int(_wait(lambda: _first_line(profile / "DevToolsActivePort"), 60, "no browser came up"))

    def open(self, url: str) -> Page:
        """A new page at `url`, loaded."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=30) as answer:
            target = json.load(answer)
        page = Page(target["webSocketDebuggerUrl"])
        page.call("Page.enable")
        page.call("Page.navigate", url=url)
        return page

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Page:
    """A page of the browser."""

    def __init__(self, address: str):
        self._open = contextlib.ExitStack()
        self.socket = self._open.enter_context(connect(address, max_size=None, open_timeout=30))
        self.numbers = itertools.count(1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        """The first true value of the expression."""
        return _wait(lambda: self.value(expression), seconds, f"{expression} never came true")

    def press(self, key: str) -> None:
        """A key, down and up."""
        code, number = SPECIAL[key] if key in SPECIAL else (f"Key{key.upper()}", ord(key.upper()))
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.call("Page.close")
        self._open.close()


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _wait(condition: Any, seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value
