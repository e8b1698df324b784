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

import psutil
from common import ROOT
from tqdm import tqdm

SWIFT = Path(sys.executable).with_name("swift")
STARTUP_SECONDS = 600


class ServerProcess:
    """The server's first process and all that it has started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        with tqdm(
            desc="Starting swift rollout", bar_format="{desc}: {elapsed}", mininterval=2
        ) as clock:
            while not self._is_healthy():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    end = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
                    raise SystemExit(f"swift rollout did not come up:\n{end}")
                time.sleep(0.5)
                clock.update()

    def kill(self) -> None:
        """End the process group, and workers that have left it."""
        family = self._family() if self.process.poll() is None else []
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait()

    def _family(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def _is_healthy(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/health"
        with suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
        return False


@contextmanager
def rollout_server(model: Path, replicas: int, argv: Sequence[str]) -> Iterator[ServerProcess]:
    """A healthy server of `model`; ends with the block, also on Ctrl-C and SIGTERM.

    Several replicas share the cores evenly, unless OMP_NUM_THREADS says otherwise.

    Args:
        argv: further arguments of `swift rollout`.
    """
    port = _free_port()
    log = ROOT / "output" / "bench" / f"rollout-{replicas}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(str(SWIFT), "rollout", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model.resolve()), "--external_plugins", "plugins/grpo_ext.py"),
        *("--vllm_data_parallel_size", str(replicas), *argv),
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    process = _start(command, log, {**_share_of_cores(replicas), **os.environ})
    server = ServerProcess(process, port, log)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.kill()


def _share_of_cores(replicas: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(cores // replicas, 1))} if replicas > 1 else {}


def _start(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as f:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=f,
            stderr=f,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
