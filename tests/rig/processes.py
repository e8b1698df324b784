"""Real `swift` processes for tests, with all processes that they start."""

import itertools
import os
import random
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import requests

from tests.rig.memory import needed, reserved
from tests.rig.zygote import fork

ROOT = Path(__file__).resolve().parents[2]
SWIFT = Path(sys.executable).with_name("swift")
PLUGIN = "plugins/grpo_ext.py"
EXTENSION = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main())"
COMMAND = (sys.executable, "-c", EXTENSION)
"""`swift-grpo-ext`, forked from the zygote."""

SECONDS_OF_RUN, SECONDS_TO_END = 1100, 120
MARKER = "SWIFT_GRPO_EXT_TEST"
_OWN = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # spinning would starve the others


@dataclass
class Finished:
    """How a process ended."""

    returncode: int
    output: str

    def check(self) -> "Finished":
        """Assert a good end; return it."""
        assert self.returncode == 0, self.cause
        return self

    @property
    def cause(self) -> str:
        """The end of the output, without torchrun's report below a rank's error."""
        torchruns = r"\n[^\n]*torch/(?:distributed/elastic/)?multiprocessing/"
        return re.split(torchruns, self.output)[0][-3000:]


@dataclass
class Running:
    """A process, the file of its output, and the marker in its descendants' environments."""

    process: BaseProcess
    log: Path
    marker: str

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until the output has `text`; fail if the process or the time ends before."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.exitcode is None, f"ended early:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"no {text!r} yet:\n{self.output[-3000:]}"
            time.sleep(0.2)

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def wait(self, seconds: float) -> Finished:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"no end after {seconds} s"
        return Finished(self.process.exitcode, self.output)

    def interrupt(self) -> None:
        """Do what Ctrl-C does in a terminal, and assert that no process is left."""
        os.killpg(self.pid, signal.SIGINT)
        assert self.survivors(SECONDS_TO_END) == []

    def survivors(self, seconds: float) -> list[psutil.Process]:
        """Wait up to `seconds` for all processes of the family to end; return those that live."""
        deadline = time.monotonic() + seconds
        while (alive := family(self.marker, self.pid)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return alive


def family(marker: str, session: int) -> list[psutil.Process]:
    """Return all living processes that inherited `marker` or are in this session, whatever their
    parent. A forked process shows the zygote's environment, but has a session of its own."""
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
) -> Iterator[Running]:
    """Fork a process from the zygote, in a session of its own; kill it and its descendants at the
    end of the block. Both outputs go to `log`; standard output goes to `out` if given."""
    marker = uuid.uuid4().hex
    own = {**_OWN, "MASTER_PORT": str(free_port()), **(env or {}), MARKER: marker}
    with reserved(needed(command, env or {})):
        log.touch()
        (out or log).touch()
        running = Running(fork(command, {**os.environ, **own}, out or log, log), log, marker)
        try:
            yield running
        finally:
            for member in family(marker, running.pid):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            running.process.join()


def run(
    *command: str, log: Path, env: dict[str, str] | None = None, out: Path | None = None
) -> Finished:
    """Run a command to its end."""
    with started([*command], log, env, out=out) as running:
        return running.wait(SECONDS_OF_RUN)


def swift(*argv: str, log: Path, env: dict[str, str] | None = None) -> Finished:
    return run(str(SWIFT), *argv, log=log, env=env)


def run_module(name: str, *argv: str, log: Path, env: dict[str, str] | None = None) -> None:
    """Run `python -m NAME ARGV` to a good end."""
    run(sys.executable, "-m", name, *argv, log=log, env=env).check()


@contextmanager
def rollout_server(
    *argv: str,
    log: Path,
    env: dict[str, str] | None = None,
    port: int | None = None,
    command: str = "rollout",
    by_ctrl_c: bool = False,
) -> Iterator[int]:
    """Run a server of `swift COMMAND`; yield its port once it is healthy.

    At the end the server is killed or, with `by_ctrl_c`, interrupted; then no process may be left.
    """
    port = port or free_port()
    started_by = [str(SWIFT), command, "--port", str(port), "--host", "127.0.0.1", *argv]
    with started(started_by, log, env) as running:
        running.wait_for("Uvicorn running on", seconds=600)
        yield port
        if by_ctrl_c:
            running.interrupt()


def health(port: int) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer of `/health/`; 0 and {} if the server does not answer."""
    with suppress(requests.RequestException):
        answer = requests.get(f"http://127.0.0.1:{port}/health/", timeout=5)
        return answer.status_code, answer.json()
    return 0, {}


_FIRST, _LAST = 10_240, 32_000
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_START = int(_WORKER[2:]) % 8 * 2700 if _WORKER else random.SystemRandom().randrange(_LAST)
_numbers = itertools.count(_START + os.getppid() % 24 * 100)
"""Numbers of ports. Each worker counts in a range of its own: another worker may have found a port
free and not bound it yet. Without workers the range begins anywhere, for other runs of pytest."""


def free_port() -> int:
    """Return a free port below those that the kernel hands out. A process binds it seconds later;
    meanwhile nobody who asks the kernel for any port may get it."""
    while True:
        port = _FIRST + next(_numbers) % (_LAST - _FIRST)
        with suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port
