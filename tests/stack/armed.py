"""A plugin for tests, of trainer and server: faults that a training arms step by step, and that
replicas and connections meet once (`fault_table.ON_REAL_STACK`).

The folder comes from the environment variable `ARMED`. It holds `schedule.json`, a list of
`fault_table.RealFault` as dictionaries. A fault that is armed is a file there. Who meets it removes
it, so that what is left at the end was never met. The reward `arm` arms those of the next step,
once all replicas are there; the file `url` tells it the server's address.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server.replicas import WorkerConnection

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
CONNECTION = "http"
IDLE = "idle"
REPLICAS = 2
SECONDS_TO_COME_BACK = 300
DELAY = 0.5


def folder() -> Path:
    return Path(os.environ["ARMED"])


def arm(step: int, at: Path) -> None:
    """Arm the faults of this step; those of an idle replica happen now."""
    for fault in json.loads((at / "schedule.json").read_text(encoding="utf-8")):
        method, where, action = fault["method"], fault["where"], fault["action"]
        if fault["step"] != step:
            continue
        if method == IDLE:
            os.kill(int((at / f"pid{where}").read_text()), SIGNALS[action])
        else:
            (at / f"{method}@{where}@{action}").touch()


def taken(method: str, where: str, at: Path) -> str:
    """The fault that is armed for this, which it then is no more; "" for none."""
    for path in at.glob(f"{method}@{where}@*"):
        with suppress(FileNotFoundError):
            path.unlink()
            return path.name.rpartition("@")[2]
    return ""


# --- a replica ---


class ArmedConnection:
    """The worker's end of its pipe, which meets what is armed for a command."""

    def __init__(self) -> None:
        self.recv, self.send = WorkerConnection.recv, WorkerConnection.send
        self.spoils = False

    def receive(self, connection: WorkerConnection) -> Any:
        where = os.environ["SWIFT_ROLLOUT_DP_RANK"]
        (folder() / f"pid{where}").write_text(str(os.getpid()))
        command = self.recv(connection)
        action = taken(method_of(command), where, folder())
        if action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[action])
        if action == "delay":
            time.sleep(DELAY)
        self.spoils = action == "corrupt"
        return command

    def answer(self, connection: WorkerConnection, reply: Any) -> None:
        if self.spoils and isinstance(reply, list):
            reply = reply[:-1]
        elif self.spoils:
            connection._connection.send((0, reply))  # the answer to something else
        self.spoils = False
        self.send(connection, reply)


def method_of(command: dict[str, Any]) -> str:
    """As `fault_table.OF_REPLICAS` names it."""
    kwargs = command.get("kwargs", {})
    if command["method"] == "infer":
        metadata = wire.read_metadata(wire.data_dict_of(kwargs["infer_requests"][0]))
        return f"infer {metadata.sample_id.phase if metadata else ''}"
    return str(kwargs.get("method", command["method"]))


# --- the training ---


class Arm(ORM):
    """Rewards nothing; prepares the next step's faults."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        sample_id = SampleId.parse(request_id[0])
        if sample_id.phase == "train":
            (folder() / f"step{sample_id.step}").touch()
            wait_for_replicas((folder() / "url").read_text())
            arm(sample_id.step + 1, folder())
        return [0.0] * len(completions)


def wait_for_replicas(url: str) -> None:
    """Until all are there, those counted that wait for weights."""
    deadline = time.monotonic() + SECONDS_TO_COME_BACK
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health/", timeout=5) as response:
            health = json.load(response)
            if health["replicas"] + health["waiting_for_weights"] == REPLICAS:
                return
        assert time.monotonic() < deadline, "a lost replica did not come back"
        time.sleep(0.3)


# --- connections ---


@contextmanager
def breaking_proxy(port: int, at: Path) -> Iterator[int]:
    """Stands before a server; its own port. A request for which `cut` is armed does not get there,
    and the answer to one for which `lose` is does not get back: the connection ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=_accept, args=(listener, port, at), daemon=True)
        accepting.start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, port: int, at: Path) -> None:
    with suppress(OSError):  # it is closed
        while True:
            client, _ = listener.accept()
            with suppress(OSError):
                both = client, socket.create_connection(("127.0.0.1", port))
                loses = threading.Event()
                for pump in (_requests, _answers):
                    threading.Thread(target=pump, args=(*both, loses, at), daemon=True).start()


def _requests(client: socket.socket, server: socket.socket, loses: Any, at: Path) -> None:
    with suppress(OSError):
        while data := client.recv(2**20):
            is_head = data[:5] in (b"POST ", b"GET /")
            path = data.split(b" ", 2)[1].strip(b"/").decode() if is_head else ""
            action = taken(path, CONNECTION, at) if path else ""
            if action == "cut":
                break
            if action == "lose":
                loses.set()
            server.sendall(data)
    _end(client, server)


def _answers(client: socket.socket, server: socket.socket, loses: Any, at: Path) -> None:
    with suppress(OSError):
        while (data := server.recv(2**20)) and not loses.is_set():
            client.sendall(data)
    _end(client, server)


def _end(*both: socket.socket) -> None:
    for one in both:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def install() -> None:
    armed = ArmedConnection()
    WorkerConnection.recv = lambda self: armed.receive(self)  # type: ignore[method-assign]
    WorkerConnection.send = lambda self, reply: armed.answer(self, reply)  # type: ignore
    orms["arm"] = Arm


if "ARMED" in os.environ:
    install()
