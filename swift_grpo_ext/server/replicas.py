"""The replicas of a `swift rollout`: each call is paired with its answer, and bounded in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.utils import get_logger

from swift_grpo_ext.rollout.dispatch import (
    FAILURE,
    REQUEST_FAULT,
    NoWorkerError,
    RequestError,
    WorkerError,
    WorkerLostError,
    dispatch,
)
from swift_grpo_ext.rollout.served import give_up, go_on
from swift_grpo_ext.timing.stalls import waiting
from swift_grpo_ext.upstream.threads import in_thread

logger = get_logger()

T = TypeVar("T")

GIVE_UP = "give up"  # a command without a reply: the client of the conversations has left
GOES_ON = "goes on"  # a reply before the reply: a replica's conversations go on
Command = dict[str, Any] | str  # one of ms-swift's commands, or `GIVE_UP`

NONE_LEFT = "it has no replica left"
SECONDS_BETWEEN_POLLS = 0.25
SECONDS_TO_END = 10.0
# All replicas of a server share these. A fault of the model or the machine returns after each.
MAX_RESTARTS = 3


def rpc(method: str, args: tuple[Any, ...] = (), kind: str = "call") -> dict[str, Any]:
    """Return the command that calls a method of each worker."""
    return {"type": kind, "method": "collective_rpc", "kwargs": {"method": method, "args": args}}


class WorkerConnection:
    """A worker's end of its pipe: removes the number of each command, and adds it to the reply."""

    _is_free = threading.Lock()  # of the class: an instance is pickled for the worker's process

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._number: int | None = None
        self._commands: SimpleQueue[tuple[int, Command] | Exception] | None = None

    def recv(self) -> Any:
        if self._commands is None:  # the first time, in the worker's process
            self._commands = SimpleQueue()
            threading.Thread(target=self._listen, args=[self._commands], daemon=True).start()
        message = self._commands.get()
        if isinstance(message, Exception):
            raise message
        self._number, command = message
        return command

    def send(self, reply: Any) -> None:
        with self._is_free:
            self.connection.send((self._number, reply))

    def _listen(self, commands: SimpleQueue[tuple[int, Command] | Exception]) -> None:
        """Read commands."""
        try:
            while True:
                began = monotonic()
                if not self.connection.poll(SECONDS_BETWEEN_POLLS):
                    # The tools of conversations may take longer than a replica may be silent.
                    if go_on(began):
                        self.send(GOES_ON)
                    continue
                message = self.connection.recv()
                if message[1] == GIVE_UP:
                    give_up()
                else:
                    commands.put(message)
        except Exception as e:  # the server has ended
            commands.put(e)


class ReplicaConnection:
    """The server's end of a replica's pipe. `number` names the replica's devices; `start` counts
    the restarts of this server's replicas, this one included."""

    def __init__(
        self, connection: Connection, process: BaseProcess, number: int = 0, start: int = 0
    ) -> None:
        self._connection, self.process = connection, process
        self.number, self.name = number, f"{number}.{start}"
        self.holds_weights = start == 0  # the weights of the server's start, or a trainer's
        self._numbers = count(1)
        # Writes in order, and off the event loop: a pipe may be full.
        self._writer = ThreadPoolExecutor(1)

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(self._connection.poll(timeout))

    def recv(self) -> Any:
        """Return the worker's first message: that it is ready, or why it is not."""
        return self._connection.recv()[1]

    def send(self, command: Command) -> int:
        """Let the writer send a command, and return the command's number."""
        number = next(self._numbers)
        self._writer.submit(self._connection.send, (number, command))
        return number

    def end(self) -> None:
        self.process.kill()
        self.process.join(SECONDS_TO_END)
        self._writer.shutdown(wait=False)
        self._connection.close()

    def call(self, command: Command, timeout: float) -> Any:
        """Return the reply to a command of type `call`. A replica may be silent for `timeout`
        seconds, and again after each `GOES_ON`. Raise `WorkerLostError` if it is lost."""
        late = WorkerLostError(f"a replica has not answered for {timeout:g} s (--rollout_timeout)")
        number, reply = self.send(command), GOES_ON
        method = command["method"] if isinstance(command, dict) else command
        try:
            with waiting(f"replica {self.name}: `{method}`"):
                while reply == GOES_ON:
                    deadline = monotonic() + timeout
                    if not self._connection.poll(timeout):
                        raise late
                    reading = in_thread(self._connection.recv)  # the replica may stop halfway
                    answered, reply = reading.result(max(deadline - monotonic(), 1.0))
        except FutureTimeoutError as e:
            raise late from e
        except (EOFError, OSError) as e:
            raise WorkerLostError(f"a replica has ended ({type(e).__name__})") from e
        # A late answer must not count as the next one's (docs/promises.md, F1).
        if answered != number:
            raise WorkerLostError(f"a replica answered message {answered}, expected {number}")
        return reply


def start_replica(server: SwiftRolloutDeploy, number: int, start: int = 0) -> ReplicaConnection:
    server_end, worker_end = Pipe()
    worker = rollout.llm_worker_entry if server.use_async_engine else rollout.llm_worker
    args = (server.args, number, server.master_port, WorkerConnection(worker_end))
    process = rollout.Process(target=worker, args=args)
    try:
        process.start()
    finally:
        worker_end.close()
    server.processes.append(process)  # ms-swift ends them with the server
    return ReplicaConnection(server_end, process, number, start)


def start_replicas(self: SwiftRolloutDeploy) -> None:
    self.connections = [start_replica(self, number) for number in range(self.num_connections)]
    self.restarts = Restarts(self, MAX_RESTARTS)


class Restarts:
    """Restarts lost replicas of `server`, `budget` times in all."""

    def __init__(self, server: SwiftRolloutDeploy, budget: int) -> None:
        self._server, self._budget, self._count = server, budget, 0
        self.lost: list[int] = []  # numbers of replicas to restart
        self.starting: list[ReplicaConnection] = []

    @property
    def num_awaited(self) -> int:
        """Return the number of replicas that may still join."""
        return len(self.starting) + min(len(self.lost), self._budget - self._count)

    @property
    def num_ready(self) -> int:
        """Return the number of replicas that wait for weights."""
        return sum(c.process.is_alive() and c.poll() for c in self.starting)

    def start_lost(self) -> None:
        # Call it in the event loop's thread: a replica ends with the thread that started it.
        lost, self.lost = self.lost, []
        for number in lost:
            if self._count >= self._budget:
                logger.error(
                    f"Giving up on replica {number} after {self._budget} restarts. Fix the cause "
                    "above and restart `swift rollout`."
                )
                continue
            self._count += 1
            tries = f"{self._count} of {self._budget}"
            try:
                self.starting.append(start_replica(self._server, number, self._count))
                logger.warning(f"Restarting replica {number} ({tries}).")
            except OSError as e:  # no memory, too many files
                self.lost.append(number)  # tried again after the next request
                logger.error(f"Replica {number} could not be started ({e}): try {tries}.")

    def admit(self) -> None:
        """Let replicas that are ready join, before weights are sent."""
        # They have the base model's weights, and generate once they hold a trainer's (F4).
        for connection in list(self.starting):
            if not connection.poll() and connection.process.is_alive():
                continue  # it is still loading
            status = {"status": "ended"}
            with suppress(EOFError, OSError):
                if connection.poll():
                    status = connection.recv()
            self.starting.remove(connection)
            if status.get("status") == "ready":
                self._server.connections.append(connection)
            else:
                logger.error(f"Replica {connection.number} did not start: {status}")
                connection.end()
                self.lost.append(connection.number)


def prune(server: SwiftRolloutDeploy) -> None:
    for connection in list(server.connections):
        if not connection.process.is_alive():
            status = connection.process.exitcode
            remove(server, connection, f"its process ended with status {status}")


def remove(server: SwiftRolloutDeploy, connection: ReplicaConnection, cause: object) -> None:
    """End a replica, and use it no more."""
    server.connections.remove(connection)
    connection.end()
    left = f"{len(server.connections)} are left, and get weights when the trainer reconnects"
    logger.error(f"A replica is lost ({cause}); {left}.")
    server.restarts.lost.append(connection.number)


def call_all(server: SwiftRolloutDeploy, command: Command) -> list[Any]:
    """Return the replies of all replicas. Raise `NoWorkerError` with the causes if none is left."""
    # A replica is ended if its reply is missing, late or to another message (docs/promises.md, F1).
    calls = [(c, in_thread(partial(c.call, command, server.timeout))) for c in server.connections]
    replies, causes = [], []
    for connection, reply in calls:
        try:
            replies.append(reply.result())
        except WorkerLostError as e:
            remove(server, connection, e)
            causes.append(str(e))
    if not replies:
        raise NoWorkerError("; ".join(causes) or NONE_LEFT)
    return replies


def generate(
    server: SwiftRolloutDeploy,
    config: RequestConfig | None,
    connection: ReplicaConnection,
    requests: Sequence[Mapping[str, Any]],
) -> list[RolloutOutput]:
    """Return a replica's outputs; a scheduler may make several for a request."""
    kwargs = {"infer_requests": requests, "request_config": config, "use_tqdm": False}
    method = "async_infer" if server.use_async_engine else "infer"
    answer = connection.call({"type": "call", "method": method, "kwargs": kwargs}, server.timeout)
    if isinstance(answer, dict) and FAILURE in answer:
        error = RequestError if answer.get(REQUEST_FAULT) else WorkerError
        raise error(f"a replica failed: {answer[FAILURE]}")
    if not isinstance(answer, list):
        raise WorkerError("a replica gave no answers; the log of `swift rollout` tells why")
    return answer


def spread(
    server: SwiftRolloutDeploy,
    costs: Sequence[float],
    send: Callable[[ReplicaConnection, list[int]], Sequence[T]],
) -> list[T]:
    """Return the answers of the replicas that hold weights, in order; lost ones are removed.
    Arguments and errors are those of `dispatch`."""

    def workers() -> dict[ReplicaConnection, float]:
        return {c: 1.0 for c in server.connections if c.holds_weights}

    def on_failure(connection: ReplicaConnection, error: WorkerError) -> None:
        # `dispatch` gives its groups to others (docs/promises.md, F3).
        if isinstance(error, WorkerLostError):
            remove(server, connection, error)

    if not workers():
        count = len(server.connections)
        cause = f"its {count} replicas wait for a training's weights; send these first"
        raise NoWorkerError(cause if count else NONE_LEFT)
    return dispatch(costs, workers, send, on_failure)
