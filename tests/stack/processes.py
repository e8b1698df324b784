"""Real `swift` processes for tests, and all the processes that they start."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from tests.stack.memory import needed, reserved
from tests.stack.zygote import Forked

ROOT = Path(__file__).resolve().parents[2]
SWIFT = Path(sys.executable).with_name("swift")
PLUGIN = "plugins/grpo_ext.py"
EXTENSION = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main())"
COMMAND = (sys.executable, "-c", EXTENSION)
"""`swift-grpo-ext`, forked from the zygote."""

SECONDS_TO_END = 120
MARKER = "SWIFT_GRPO_EXT_TEST"
_OWN = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # spinning would starve the others


@dataclass
class Finished:
    """How a process ended."""

    returncode: int
    output: str

    @property
    def cause(self) -> str:
        """The end of the output, without what torchrun adds to a rank's own words."""
        torchruns = r"\n[^\n]*torch/distributed/elastic/multiprocessing/api.py"
        return re.split(torchruns, self.output)[0][-3000:]


@dataclass
class Running:
    """A process, the file that its output goes to, and the mark that its descendants bear."""

    process: subprocess.Popen[bytes] | Forked
    log: Path
    marker: str

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        """Return when `text` stands in the output; fails where process or time ends first."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None, f"ended early:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"no {text!r} yet:\n{self.output[-3000:]}"
            time.sleep(0.2)

    def wait(self, seconds: float) -> Finished:
        return Finished(self.process.wait(seconds), self.output)

    def survivors(self, seconds: float) -> list[psutil.Process]:
        """The processes of this family that still live after `seconds`; returns once none does."""
        deadline = time.monotonic() + seconds
        while (alive := family(self.marker, self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return alive

    def interrupt(self) -> None:
        """What Ctrl-C does in a terminal: SIGINT to every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)


def family(marker: str, session: int) -> list[psutil.Process]:
    """All living processes that inherited `marker`, or are of this session, whoever their parent is
    by now. What was forked has the environment that the zygote began with, but a session."""
    members = []
    for p in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            is_one = p.environ().get(MARKER) == marker or os.getsid(p.pid) == session
            if is_one and p.status() != psutil.STATUS_ZOMBIE:
                members.append(p)
    return members


@contextmanager
def started(
    command: list[str],
    log: Path,
    env: dict[str, str] | None = None,
    *,
    out: Path | None = None,
    real: bool = False,
) -> Iterator[Running]:
    """A process with a process group of its own; it and all that it started end with the block.

    Python and `swift` are forked from the zygote, with what they import, unless they are to be
    `real`. Both outputs go to `log`, or standard output to `out`.
    """
    marker = uuid.uuid4().hex
    own = {**_OWN, "MASTER_PORT": str(free_port()), **(env or {}), MARKER: marker}
    environment = {**os.environ, **own}
    is_forked = not real and command[0] in (str(SWIFT), sys.executable)
    process: subprocess.Popen[bytes] | Forked
    with reserved(needed(command, env or {})):
        log.touch()
        (out or log).touch()
        if is_forked:
            process = Forked(command, environment, out or log, log)
        else:
            with log.open("wb") as f:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=f,
                    stderr=f,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    # A shell's background jobs, and all below, ignore SIGINT: not so in a terminal.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
        try:
            yield Running(process, log, marker)
        finally:
            for member in family(marker, process.pid):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


def swift(
    *argv: str, log: Path, env: dict[str, str] | None = None, seconds: float = 900
) -> Finished:
    """Run `swift ARGV` to its end."""
    with started([str(SWIFT), *argv], log, env) as running:
        return running.wait(seconds)


@contextmanager
def rollout_server(
    *argv: str,
    log: Path,
    env: dict[str, str] | None = None,
    port: int | None = None,
    command: str = "rollout",
    by_ctrl_c: bool = False,
) -> Iterator[int]:
    """A healthy `swift rollout` server, or of another `command`; the value is its port.

    It is killed at the end, or interrupted `by_ctrl_c`, of which nothing may be left.
    """
    port = port or free_port()
    started_by = [str(SWIFT), command, "--port", str(port), "--host", "127.0.0.1", *argv]
    with started(started_by, log, env) as running:
        running.wait_for("Uvicorn running on", seconds=600)
        yield port
        if by_ctrl_c:
            running.interrupt()
            assert running.survivors(SECONDS_TO_END) == []


def health(port: int) -> tuple[int, dict[str, Any]]:
    """The status of a server and what it says; 0 and nothing where a busy one is silent."""
    with suppress(requests.RequestException):
        answer = requests.get(f"http://127.0.0.1:{port}/health/", timeout=5)
        return answer.status_code, answer.json()
    return 0, {}


_FIRST, _LAST = 10_240, 32_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = itertools.count(_WORKER % 8 * 2700 + os.getppid() % 24 * 100)
"""Of ports. A worker of pytest takes some hundred, and must not come to where another began: that
one may have found a port free and not taken it yet."""


def free_port() -> int:
    """Below those that the kernel hands out: a process takes its port seconds after it was found
    free, and nobody who asks for any port must have it by then."""
    while True:
        port = _FIRST + next(_numbers) % (_LAST - _FIRST)
        with suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port
