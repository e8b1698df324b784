"""Headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
WAIT_SECONDS = 30.0
"""Bound on a page that hangs."""


def wait_for(found: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not found():
        assert time.monotonic() < end, f"waited {WAIT_SECONDS:.0f} s for {what}"
        time.sleep(0.05)


@contextmanager
def open_chrome(profile: Path) -> Iterator[Chrome]:
    """Run a browser with one empty page."""
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--lang=en-US"),
        *("--disable-quic", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--window-size=1280,900"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
    ]
    process = subprocess.Popen([str(BROWSER), *options], stderr=subprocess.DEVNULL)
    port_file = profile / "DevToolsActivePort"
    try:
        wait_for(lambda: port_file.is_file() and "/" in port_file.read_text(), "the browser")
        port, path = port_file.read_text(encoding="utf-8").split()
        direct = socket.create_connection(("127.0.0.1", int(port)))  # not through a proxy
        with connect(f"ws://127.0.0.1:{port}{path}", sock=direct, max_size=None) as connection:
            yield Chrome(connection)
    finally:
        process.terminate()
        process.wait()


class Chrome:
    """A page of a browser; `problems` has its uncaught errors."""

    def __init__(self, connection: ClientConnection) -> None:
        self.problems: list[str] = []
        self._connection = connection
        self._ids = count()
        self._session: dict[str, str] = {}
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=WAIT_SECONDS))
            params = answer.get("params", {})
            entry = params.get("entry", {})
            is_error = entry.get("level") == "error" and entry.get("source") != "network"
            if is_error or answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params)[:500])
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("true")

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until the page is loaded and an expression is true."""

        def is_true() -> bool:
            try:
                return bool(self.run(f"!!(document.body.dataset.ready && ({script}))"))
            except AssertionError:  # the browser is loading another page
                return False

        wait_for(is_true, script)

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({selector!r})")
        self.run(f"document.querySelector({selector!r}).click()")

    def texts(self, selector: str) -> list[str]:
        script = f"[...document.querySelectorAll({selector!r})].map(e => e.innerText)"
        found: list[str] = self.run(script)
        return found
