"""A `swift rollout` with this plugin, and its end: no process of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from common import ROOT

SWIFT = Path(sys.executable).with_name("swift")
STARTUP_SECONDS = 600


@contextmanager
def rollout_server(model: Path, argv: Sequence[str]) -> Iterator[int]:
    """Start a server of `model`, which ends with the block, also on SIGTERM; yield its port.

    Args:
        argv: further arguments of `swift rollout`.
    """
    port = free_port()
    log = ROOT / "output" / "bench" / "rollout.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(str(SWIFT), "rollout", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model.resolve()), "--external_plugins", "plugins/grpo_ext.py", *argv),
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    with log.open("wb") as f:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=f, stderr=f, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        deadline = time.monotonic() + STARTUP_SECONDS
        print("Starting swift rollout", file=sys.stderr)
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise SystemExit(f"swift rollout did not come up:\n{end}")
            time.sleep(0.5)
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
        return True
    return False


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
