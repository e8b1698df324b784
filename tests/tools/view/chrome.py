"""Headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import pytest
from websockets.sync.client import connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
WAIT_SECONDS = 30.0
"""Only a page that hangs reaches it."""


def wait_for(found: Callable[[], Any], what: str) -> Any:
    """What `found` returns once it is true; fails after `WAIT_SECONDS`."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {WAIT_SECONDS:.0f} s for {what}")


class Chrome:
    """One browser with one page; its uncaught errors are in `problems`."""

    def __init__(self, profile: Path, *argv: str) -> None:
        command = [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-quic", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", *argv, "about:blank"),
        ]
        self.problems: list[str] = []
        self._id = 0
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        port_file = profile / "DevToolsActivePort"
        lines = wait_for(
            lambda: port_file.is_file() and port_file.read_text(encoding="utf-8").splitlines()[1:],
            "the browser",
        )
        port = port_file.read_text(encoding="utf-8").splitlines()[0]
        self._session: str | None = None
        address = f"ws://127.0.0.1:{port}{lines[0]}"
        # Since websockets 15, which Gradio of ms-swift 4.4 excludes.
        direct = {"proxy": None} if "proxy" in inspect.signature(connect).parameters else {}
        self._connection = connect(address, max_size=None, **direct)
        self._socket = self._connection.__enter__()  # left in `__exit__`
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t for t in targets if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=WAIT_SECONDS))
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
            entry = answer.get("params", {}).get("entry", {})
            if entry.get("level") == "error" and entry.get("source") != "network":
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            if answer.get("id") == self._id:
                assert "error" not in answer, (method, answer["error"])
                return cast(dict[str, Any], answer["result"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("true")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true of a page that has come whole."""

        def is_true() -> bool:
            try:
                return bool(self.run(f"!!(document.body.dataset.ready && ({script}))"))
            except AssertionError:  # the browser is between two pages
                return False

        wait_for(is_true, script)

    def click(self, selector: str) -> None:
        self.until(f"!!document.querySelector({selector!r})")
        self.run(f"document.querySelector({selector!r}).click()")

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def fill(self, selector: str, value: str) -> None:
        self.run(
            f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('input', {{bubbles: true}}));"
            f" e.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
            f"(document.querySelector({selector!r}))"
        )

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            f"[...document.querySelectorAll({selector!r})].map(e => e.innerText)"
        )
        return found

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=phone)  # fmt: skip

    def __enter__(self) -> Chrome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._connection.__exit__(None, None, None)
        self._process.terminate()
        self._process.wait()
