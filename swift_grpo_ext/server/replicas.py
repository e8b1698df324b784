"""The replicas of a `swift rollout`: each call is paired with its answer, and bounded in time.

Both ends of a replica's pipe number their messages (docs/promises.md, F1). A replica whose reply is
missing, late or to another message is ended, and others generate its groups (F3). It is
restarted, joins the others when a trainer is about to send weights, and generates once it holds
them (F4). With ms-swift 4.6 a replica answers every request with the reply before, once one reply
was late; one that hangs is waited for without limit.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from types import SimpleNamespace
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
from swift_grpo_ext.upstream.patches import Moment, patch, repair

logger = get_logger()

T = TypeVar("T")

GIVE_UP = "give up"  # a command without a reply: nobody waits for the conversations
GOES_ON = "goes on"  # a reply before the reply: a replica's conversations go on
Command = dict[str, Any] | str
"""A replica receives one of ms-swift's commands, or `GIVE_UP`."""

NONE_LEFT = "it has no replica left"
SECONDS_BETWEEN_NOTES = 0.25
SECONDS_TO_END = 10.0
MAX_RESTARTS = 3
"""Restarts of a server's replicas, in all. An accident is over after one (memory that ran short, a
driver's hiccup); a fault of the model or the machine comes again, and a restart takes minutes."""


# --- the worker's end ---


class WorkerConnection:
    """A worker's end of its pipe. ms-swift's loop sees the contents of messages alone; its replies
    get their commands' numbers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._number: int | None = None
        self._is_free: threading.Lock | None = None  # made in the worker: locks cannot be pickled
        self._is_read: threading.Lock | None = None
        self._unread: list[tuple[int, Command]] = []

    def recv(self) -> Any:
        if self._is_free is None or self._is_read is None:
            self._is_free, self._is_read = threading.Lock(), threading.Lock()
            threading.Thread(target=self._tell_of_conversations, daemon=True).start()
        while True:
            with self._is_read:
                message = self._unread.pop(0) if self._unread else self.connection.recv()
            self._number, command = message
            if command != GIVE_UP:
                return command

    def send(self, reply: Any) -> None:
        with self._is_free or nullcontext():
            self.connection.send((self._number, reply))

    def _tell_of_conversations(self) -> None:
        """Tell the server while conversations go on: their tools may take longer than a replica may
        be silent. End them where nobody waits for them."""
        with suppress(EOFError, OSError):  # the server has ended
            while True:
                began = monotonic()
                time.sleep(SECONDS_BETWEEN_NOTES)
                if go_on(began):
                    self.send(GOES_ON)
                assert self._is_read is not None
                if not self._is_read.acquire(blocking=False):
                    continue  # `recv` waits: no command is worked at
                try:
                    if self.connection.poll():
                        message: tuple[int, Command] = self.connection.recv()
                        if message[1] == GIVE_UP:
                            give_up()
                        else:
                            self._unread.append(message)  # for `recv`
                finally:
                    self._is_read.release()

    def close(self) -> None:
        self.connection.close()


def numbered_pipe() -> tuple[Connection, WorkerConnection]:
    """Return the ends of a pipe to a worker of ms-swift's, which gets the second."""
    ours, theirs = Pipe()
    return ours, WorkerConnection(theirs)


@repair(
    Moment.SERVER,
    symptom="An answer of a replica that came late is taken for the next one's, and a "
    "replica that ended is waited for.",
    upstream="ms-swift 4.6, pipelines/infer/rollout.py: messages to workers have no numbers.",
    until="they have, and waits are bounded",
)
def number_messages() -> None:
    """Let `swift rollout` number its messages. Call this before a server is made."""
    start = SwiftRolloutDeploy._start_data_parallel_workers

    def _start_data_parallel_workers(self: SwiftRolloutDeploy) -> None:
        start(self)
        pairs = zip(self.connections, self.processes, strict=True)
        self.connections = [ReplicaConnection(*pair, number) for number, pair in enumerate(pairs)]
        self.restarts = Restarts(self, MAX_RESTARTS)

    patch(rollout, Pipe=numbered_pipe)
    patch(SwiftRolloutDeploy, _start_data_parallel_workers=_start_data_parallel_workers)


# --- the server's end ---


class ReplicaConnection:
    """The server's end of the pipe of a replica.

    Args:
        number: names the replica's devices.
        start: how often replicas of this server were restarted, this one included.
    """

    def __init__(
        self, connection: Connection, process: BaseProcess, number: int = 0, start: int = 0
    ) -> None:
        self._connection, self.process = connection, process
        self.number, self.name = number, f"{number}.{start}"
        self.holds_weights = start == 0  # those that the server started with, or a trainer's
        self._numbers = count(1)
        self._is_free = threading.Lock()
        # Writes in order, and off the event loop: a pipe that nobody reads is full at some point.
        self._writer = ThreadPoolExecutor(1)

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(self._connection.poll(timeout))

    def recv(self) -> Any:
        """Return what the worker says unasked: that it is ready, or why it is not."""
        return self._connection.recv()[1]

    def send(self, command: Command) -> tuple[int, Future[None]]:
        """Send a command, and return its number, and when it is written."""
        number = next(self._numbers)
        return number, self._writer.submit(self._write, (number, command))

    def _write(self, message: tuple[int, Command]) -> None:
        # As `send` would, but a large string by itself: other threads run in between, where one
        # call that pickles all images of a round would hold up `/health`.
        parts: list[bytes] = []
        ForkingPickler(SimpleNamespace(write=parts.append)).dump(message)
        self._connection.send_bytes(b"".join(parts))

    def end(self) -> None:
        self.process.kill()
        self.process.join(SECONDS_TO_END)
        self._writer.shutdown(wait=False)
        self._connection.close()

    def call(self, command: Command, timeout: float) -> Any:
        """Return the reply to one of ms-swift's commands of type `call`.

        Raises:
            WorkerLostError: the replica can be used no more.
        """
        deadline = monotonic() + timeout
        late = WorkerLostError(f"a replica has not answered for {timeout:g} s (--rollout_timeout)")
        if not self._is_free.acquire(timeout=timeout):
            raise late
        try:
            with self._ended_after(timeout):
                number, written = self.send(command)
                written.result(deadline - monotonic())
            while True:
                with self._ended_after(deadline - monotonic()):
                    if not self._connection.poll(deadline - monotonic()):
                        raise late
                    answered, reply = self._connection.recv()
                if reply != GOES_ON:
                    break
                deadline = monotonic() + timeout  # it may be silent for so long, once more
        except FutureTimeoutError as e:
            raise late from e
        except (EOFError, OSError) as e:
            raise WorkerLostError(f"a replica has ended ({type(e).__name__})") from e
        finally:
            self._is_free.release()
        if answered != number:
            raise WorkerLostError(f"a replica answered message {answered}, expected {number}")
        return reply

    @contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        """End a replica that does not read a write, or stops halfway in a reply."""
        # A second after the caller's own bound, which names the cause where it can.
        ends = threading.Timer(max(seconds, 0) + 1.0, self.process.kill)
        ends.daemon = True
        ends.start()
        try:
            yield
        finally:
            ends.cancel()


class Restarts:
    """Restarts replicas of `server` that were lost, `budget` times in all, in the event loop's
    thread: a replica ends with the thread that started it."""

    def __init__(self, server: SwiftRolloutDeploy, budget: int) -> None:
        self._server, self._budget, self._count = server, budget, 0
        self.lost: list[int] = []  # numbers of replicas that are to be started
        self.starting: list[ReplicaConnection] = []
        atexit.register(self._end)  # before multiprocessing would wait for them

    def _end(self) -> None:
        for connection in self.starting:
            connection.process.kill()

    @property
    def num_awaited(self) -> int:
        """How many replicas may still join."""
        return len(self.starting) + min(len(self.lost), self._budget - self._count)

    @property
    def num_ready(self) -> int:
        """How many replicas wait for weights."""
        return sum(c.process.is_alive() and c.poll() for c in self.starting)

    def start_lost(self) -> None:
        failed = []
        while self.lost:
            number = self.lost.pop()
            if self._count >= self._budget:
                logger.error(
                    f"Giving up on replica {number} after {self._budget} restarts. Fix the cause "
                    "above and restart `swift rollout`."
                )
                continue
            self._count += 1
            parent, child = rollout.Pipe()
            is_async = self._server.use_async_engine
            process = rollout.Process(
                target=rollout.llm_worker_entry if is_async else rollout.llm_worker,
                args=(self._server.args, number, self._server.master_port, child),
            )
            try:
                process.start()
            except OSError as e:  # no memory, too many files
                parent.close()
                failed.append(number)
                tries = f"try {self._count} of {self._budget}"
                logger.error(f"Replica {number} could not be started ({e}): {tries}.")
                continue
            finally:
                child.close()
            self.starting.append(ReplicaConnection(parent, process, number, self._count))
            logger.warning(f"Restarting replica {number} ({self._count} of {self._budget}).")
        self.lost += failed  # tried again after the next request

    def admit(self) -> None:
        """Let replicas that are ready join: the caller is about to send weights."""
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
                self._server.processes.append(connection.process)
            else:
                logger.error(f"Replica {connection.number} did not start: {status}")
                connection.end()
                self.lost.append(connection.number)


def prune(server: SwiftRolloutDeploy) -> None:
    """Remove replicas that have ended."""
    for process, connection in zip(list(server.processes), list(server.connections), strict=True):
        if not process.is_alive():
            remove(server, connection, f"its process ended with status {process.exitcode}")


def remove(server: SwiftRolloutDeploy, connection: ReplicaConnection, cause: object) -> None:
    """End what is left of a replica, and use it no more."""
    if connection not in server.connections:
        return
    number = server.connections.index(connection)
    server.connections.pop(number)
    server.processes.pop(number)
    connection.end()
    logger.error(
        f"A replica is lost ({cause}); {len(server.connections)} are left. They get "
        "new weights when the trainer reconnects."
    )
    server.restarts.lost.append(connection.number)


def call_all(server: SwiftRolloutDeploy, command: Command, timeout: float) -> list[Any]:
    """Return the replies of all replicas; those that fail are removed.

    Raises:
        NoWorkerError: no replica is left; says what became of them.
    """

    def attempt(connection: ReplicaConnection) -> Any:
        try:
            return connection.call(command, timeout)
        except WorkerLostError as e:
            return e

    connections = list(server.connections)
    with ThreadPoolExecutor(max(len(connections), 1)) as pool:
        outcomes = list(pool.map(attempt, connections))
    replies, causes = [], []
    for connection, outcome in zip(connections, outcomes, strict=True):
        if isinstance(outcome, WorkerLostError):
            remove(server, connection, outcome)
            causes.append(str(outcome))
        else:
            replies.append(outcome)
    if not replies:
        raise NoWorkerError("; ".join(causes) or NONE_LEFT)
    return replies


# --- rollouts ---


def infer_groups(
    server: SwiftRolloutDeploy,
    requests: Sequence[Mapping[str, Any]],
    request_config: RequestConfig | None,
    costs: Sequence[float],
    timeout: float,
) -> list[RolloutOutput]:
    """Return the output of each request, in order. Others do what one replica cannot.

    Args:
        requests: ours, each of which has one output with all of its samples.
        timeout: seconds that a replica may be silent; twice that for all tries.
    """
    deadline = monotonic() + 2 * timeout

    def send(connection: ReplicaConnection, share: list[int]) -> list[RolloutOutput]:
        bound = min(timeout, deadline - monotonic())
        if bound <= 0:
            raise WorkerError(f"no time is left of {2 * timeout:g} s (2 x --rollout_timeout)")
        asked = [requests[i] for i in share]
        outputs = _generate(server, connection, asked, request_config, bound)
        if len(outputs) != len(asked):
            raise _miscounted(len(outputs), len(asked))
        return outputs

    return _dispatch(server, costs, send)


def infer_slices(
    server: SwiftRolloutDeploy,
    slices: Sequence[Sequence[Mapping[str, Any]]],
    request_config: RequestConfig | None,
    timeout: float,
) -> list[list[RolloutOutput]]:
    """Return the outputs of each slice, in order. Others do what one replica cannot.

    Args:
        slices: any client's requests, each slice for one replica. A server's scheduler may make
            several outputs of one request.
        timeout: seconds that a replica may be silent. Conversations take as long as they go on.
    """

    def send(connection: ReplicaConnection, share: list[int]) -> list[list[RolloutOutput]]:
        return [_generate(server, connection, slices[i], request_config, timeout) for i in share]

    return _dispatch(server, [float(len(asked)) for asked in slices], send)


def _generate(
    server: SwiftRolloutDeploy,
    connection: ReplicaConnection,
    requests: Sequence[Mapping[str, Any]],
    request_config: RequestConfig | None,
    timeout: float,
) -> list[RolloutOutput]:
    kwargs = {"infer_requests": requests, "request_config": request_config, "use_tqdm": False}
    method = "async_infer" if server.use_async_engine else "infer"
    answer = connection.call({"type": "call", "method": method, "kwargs": kwargs}, timeout)
    if isinstance(answer, dict) and FAILURE in answer:
        error = RequestError if answer.get(REQUEST_FAULT) else WorkerError
        raise error(f"a replica failed: {answer[FAILURE]}")
    if not isinstance(answer, list):
        raise _miscounted("no", len(requests))
    return answer


def _miscounted(num_answers: int | str, num_requests: int) -> WorkerError:
    return WorkerError(
        f"a replica gave {num_answers} answers to {num_requests} requests; the log of "
        "`swift rollout` tells why"
    )


def _dispatch(
    server: SwiftRolloutDeploy,
    costs: Sequence[float],
    send: Callable[[ReplicaConnection, list[int]], Sequence[T]],
) -> list[T]:
    """Return what the replicas that hold weights answer; those that are lost are removed."""

    def workers() -> dict[ReplicaConnection, float]:
        return {c: 1.0 for c in server.connections if c.holds_weights}

    def on_failure(connection: ReplicaConnection, error: WorkerError) -> None:
        if isinstance(error, WorkerLostError):
            remove(server, connection, error)

    if not workers():
        count = len(server.connections)
        waiting = f"its {count} replicas wait for a training's weights; send these first"
        raise NoWorkerError(waiting if count else NONE_LEFT)
    return dispatch(costs, workers, send, on_failure)
