"""The replicas of a `swift rollout`: each call is paired with its answer, and bounded in time.

Symptom: after one lost or late reply a replica answers every request with the reply before. A
replica that was killed answers with an error while `/health` says that all is well; one that hangs
is waited for without limit. What is lost is lost for the run.
Upstream: ms-swift 4.6, pipelines/infer/rollout.py, `SwiftRolloutDeploy.connections` and
`.processes`: a pipe and a process for each replica (one for all with the async engine);
`llm_worker` and `async_llm_worker` answer commands in turn, without a name.
Adaptation: both ends of a pipe number their messages. A replica whose reply is missing, late or to
another message is ended, and started anew within `--rollout_restarts`. It joins the others when a
trainer is about to send weights, and draws once it holds them.
Can go when ms-swift pairs messages and watches its workers.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import count
from time import monotonic
from typing import Any

from PIL import Image
from swift.utils import get_logger

from swift_grpo_ext.rollout.dispatch import (
    FAILURE,
    REQUEST_FAULT,
    NoWorkerError,
    RequestError,
    WorkerError,
    WorkerLostError,
    dispatch,
    noted_failure,
)
from swift_grpo_ext.upstream.patches import patch

logger = get_logger()

PING = "ping"
SECONDS_TO_END = 10.0

Message = tuple[int | None, Any]
"""The number of a message and its content; a reply has its command's number, `ready` has None."""


# --- the worker's end ---


class WorkerConnection:
    """A worker's end of its pipe: ms-swift's loop sees commands, and its replies get their
    numbers."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._number: int | None = None

    def recv(self) -> Any:
        """The next command; a ping gets its answer here."""
        while True:
            self._number, command = self._connection.recv()
            noted_failure.clear()
            if command != PING:
                return command
            self.send(PING)

    def send(self, reply: Any) -> None:
        if reply is None and noted_failure:
            reply = dict(noted_failure)
        self._connection.send((self._number, reply))


def run_worker(args: Any, rank: int, port: int, connection: Any) -> None:
    """ms-swift's `llm_worker`, at a numbered pipe."""
    _refuse_large_pictures()
    _upstream_worker("llm_worker")(args, rank, port, WorkerConnection(connection))


def run_async_worker(args: Any, rank: int, port: int, connection: Any) -> None:
    """ms-swift's `llm_worker_entry`, at a numbered pipe."""
    _refuse_large_pictures()
    _upstream_worker("llm_worker_entry")(args, rank, port, WorkerConnection(connection))


def _refuse_large_pictures() -> None:
    """Pillow knows a picture's size before it decodes it, and only warns of one that would take
    gigabytes. A plugin may set `PIL.Image.MAX_IMAGE_PIXELS` (89 million)."""
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def _upstream_worker(name: str) -> Any:
    from swift.pipelines.infer import rollout

    worker = getattr(rollout, name)
    return getattr(worker, "__wrapped__", worker)  # ours stands there in a forked process


def install() -> None:
    """Let `swift rollout` number its messages. Call before a server is made."""
    from swift.pipelines.infer import rollout
    from swift.pipelines.infer.rollout import SwiftRolloutDeploy

    for name, ours in (("llm_worker", run_worker), ("llm_worker_entry", run_async_worker)):
        ours.__wrapped__ = _upstream_worker(name)  # type: ignore[attr-defined]
        patch(rollout, **{name: ours})
    start = SwiftRolloutDeploy._start_data_parallel_workers

    def _start_data_parallel_workers(self: Any) -> None:
        start(self)
        self.connections = [
            ReplicaConnection(connection, process, number)
            for number, (connection, process) in enumerate(
                zip(self.connections, self.processes, strict=True)
            )
        ]
        self.restarts = Restarts(self)

    patch(SwiftRolloutDeploy, _start_data_parallel_workers=_start_data_parallel_workers)


# --- the server's end ---


class ReplicaConnection:
    """The server's end of a replica's pipe.

    Args:
        connection: of `multiprocessing.Pipe`.
        process: the replica's.
        number: of the replica, which names its devices.
        start: 0, or how often replicas of this server were started anew before.
    """

    def __init__(self, connection: Any, process: Any, number: int = 0, start: int = 0) -> None:
        self._connection, self.process = connection, process
        self.number, self.name = number, f"{number}.{start}"
        self.holds_weights = start == 0
        """Whether it may draw: those of the model that the server was given, or a trainer's."""

        self._numbers = count(1)
        self._is_free = threading.Lock()
        # Writes in order, and off the event loop: a pipe that nobody reads is full at some point.
        self._writer = ThreadPoolExecutor(1)

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(self._connection.poll(timeout))

    def recv(self) -> Any:
        """What the worker says unasked: that it is ready, or why it is not."""
        return self._connection.recv()[1]

    def send(self, command: Any) -> None:
        """A command without a reply (ms-swift's `fire_and_forget`)."""
        self._write(command)

    def _write(self, command: Any) -> tuple[int, Future[None]]:
        number = next(self._numbers)
        return number, self._writer.submit(self._connection.send, (number, command))

    def end(self) -> None:
        self.process.kill()
        self.process.join(SECONDS_TO_END)
        self._writer.shutdown(wait=False)
        self._connection.close()

    def call(self, command: Any, timeout: float) -> Any:
        """The reply to one of ms-swift's commands of type `call`.

        Raises:
            WorkerLostError: the replica has ended, has not answered for `timeout` seconds, or has
                answered something else. It can be used no more.
        """
        deadline = monotonic() + timeout
        late = WorkerLostError(f"a replica has not answered for {timeout:g} s (--rollout_timeout)")
        if not self._is_free.acquire(timeout=timeout):
            raise late
        # Ends a write that the replica does not read, and a reply that stops halfway.
        ends = threading.Timer(timeout + 1.0, self.process.kill)
        ends.daemon = True
        ends.start()
        try:
            number, written = self._write(command)
            written.result(max(deadline - monotonic(), 0.0))
            if not self._connection.poll(max(deadline - monotonic(), 0.0)):
                raise late
            answered, reply = self._connection.recv()
        except FutureTimeoutError as e:
            raise late from e
        except (EOFError, OSError) as e:
            raise WorkerLostError(f"a replica has ended ({type(e).__name__})") from e
        except (TypeError, ValueError) as e:
            raise WorkerLostError(f"a replica sent no numbered reply ({e})") from e
        finally:
            ends.cancel()
            self._is_free.release()
        if answered != number:
            raise WorkerLostError(f"a replica answered message {answered}, expected {number}")
        return reply


class Restarts:
    """Replicas of `server` that were lost, and are started anew (SPEC F4).

    All is done in the event loop's thread: a replica ends with the thread that started it.
    """

    def __init__(self, server: Any) -> None:
        self._server, self._count = server, 0
        self.lost: list[int] = []
        """Numbers of replicas that are to be started."""

        self.starting: list[ReplicaConnection] = []
        atexit.register(self._end)  # before multiprocessing would wait for them

    def _end(self) -> None:
        for connection in self.starting:
            connection.process.kill()

    @property
    def num_awaited(self) -> int:
        """Replicas that may join."""
        budget = self._server.args.rollout_restarts - self._count
        return len(self.starting) + min(len(self.lost), max(budget, 0))

    @property
    def num_ready(self) -> int:
        """Replicas that wait for weights."""
        return sum(c.process.is_alive() and c.poll() for c in self.starting)

    def start_lost(self) -> None:
        """Start what is lost, as far as `--rollout_restarts` goes."""
        from swift.pipelines.infer import rollout

        budget = self._server.args.rollout_restarts
        while self.lost:
            number = self.lost.pop()
            if self._count >= budget:
                logger.error(
                    f"Replica {number} stays lost: --rollout_restarts {budget} is used up. A "
                    "greater number lets `swift rollout` start more of them anew."
                )
                continue
            self._count += 1
            parent, child = rollout.Pipe()
            is_async = self._server.use_async_engine
            process = rollout.Process(
                target=rollout.llm_worker_entry if is_async else rollout.llm_worker,
                args=(self._server.args, number, self._server.master_port, child),
            )
            process.start()
            child.close()
            self.starting.append(ReplicaConnection(parent, process, number, self._count))
            logger.warning(f"Replica {number} is started anew ({self._count} of {budget}).")

    def admit(self) -> None:
        """Let replicas that are ready join: the caller is about to send weights."""
        for connection in list(self.starting):
            status = {"status": "ended"} if not connection.process.is_alive() else None
            if connection.poll():
                try:
                    status = connection.recv()
                except (EOFError, OSError):
                    status = {"status": "ended"}
            if status is None:
                continue
            self.starting.remove(connection)
            if status.get("status") == "ready":
                self._server.connections.append(connection)
                self._server.processes.append(connection.process)
            else:
                logger.error(f"Replica {connection.number} did not start: {status}")
                connection.end()
                self.lost.append(connection.number)


def note_weights(server: Any) -> None:
    """All replicas that are connected have the weights of a trainer."""
    for connection in server.connections:
        connection.holds_weights = True


def prune(server: Any) -> None:
    """Remove replicas that have ended."""
    for number in reversed(range(len(server.processes))):
        if not server.processes[number].is_alive():
            code = server.processes[number].exitcode
            remove(server, server.connections[number], f"its process ended with status {code}")


def remove(server: Any, connection: Any, cause: object) -> None:
    """End what is left of a replica, and use it no more."""
    if connection not in server.connections:
        return
    number = server.connections.index(connection)
    server.connections.pop(number)
    server.processes.pop(number)
    connection.end()
    logger.error(
        f"A replica is lost ({cause}); {len(server.connections)} are left. Weights reach these "
        "once the trainer has connected to them anew."
    )
    server.restarts.lost.append(connection.number)


def call_all(server: Any, command: Any, timeout: float) -> list[Any]:
    """The replies of all replicas; those that fail are removed.

    Raises:
        NoWorkerError: no replica is left; says what became of them.
    """

    def attempt(connection: Any) -> Any:
        try:
            return connection.call(command, timeout)
        except WorkerLostError as e:
            return e

    connections = list(server.connections)
    with ThreadPoolExecutor(max(len(connections), 1)) as pool:
        outcomes = list(pool.map(attempt, connections))
    lost = [outcome for outcome in outcomes if isinstance(outcome, WorkerLostError)]
    for connection, outcome in zip(connections, outcomes, strict=True):
        if isinstance(outcome, WorkerLostError):
            remove(server, connection, outcome)
    if len(lost) == len(connections):
        raise NoWorkerError("; ".join(map(str, lost)) or "it has no replica left")
    return [outcome for outcome in outcomes if not isinstance(outcome, WorkerLostError)]


def infer(
    server: Any,
    batches: Sequence[list[dict[str, Any]]],
    request_config: Any,
    costs: Sequence[float],
    timeout: float,
    is_abandoned: threading.Event | None = None,
    *,
    counted: bool = True,
    addresses: Sequence[int | None] = (),
) -> list[list[Any]]:
    """The outputs of each batch of requests, in order. Others draw what one replica cannot.

    Args:
        batches: of requests; one batch goes to one replica.
        costs: of the batches, for the balance.
        timeout: seconds that a replica has; twice that for all tries.
        is_abandoned: set when nobody waits for the outputs any more.
        counted: whether there is one output for each request.
        addresses: of the batches, the number of the replica that should draw it. An async engine
            finds it in the requests: one worker runs all of its replicas.

    Raises:
        NoWorkerError: names what became of the replicas.
        RequestError: a request is at fault.
    """
    deadline = monotonic() + 2 * timeout
    by_number: dict[int | None, Any] = dict(enumerate(server.connections))
    addressed = [by_number.get(number) for number in addresses]

    def workers() -> dict[Any, float]:
        if is_abandoned is not None and is_abandoned.is_set():
            raise RequestError("the client has left")
        return {c: 1.0 for c in server.connections if c.holds_weights}

    def send(connection: Any, share: list[int]) -> list[list[Any]]:
        bound = min(timeout, deadline - monotonic())
        if bound <= 0:
            raise WorkerError(f"no time is left of {2 * timeout:g} s (2 x --rollout_timeout)")
        is_async = server.use_async_engine
        if not counted:
            return [
                _generate(connection, is_async, batches[i], request_config, bound) for i in share
            ]
        requests = [request for i in share for request in batches[i]]
        outputs = _generate(connection, is_async, requests, request_config, bound)
        if len(outputs) != len(requests):
            raise WorkerError(
                f"a replica gave {len(outputs)} answers to {len(requests)} requests; the log of "
                "`swift rollout` tells why"
            )
        rest = iter(outputs)
        return [[next(rest) for _ in batches[i]] for i in share]

    def on_failure(connection: Any, error: WorkerError) -> None:
        if isinstance(error, WorkerLostError):
            remove(server, connection, error)

    try:
        return dispatch(costs, workers, send, on_failure, addressed)
    except NoWorkerError as e:
        raise NoWorkerError(str(e).replace("no worker is left", "it has no replica left")) from e


def _generate(
    connection: Any, use_async: bool, requests: list[Any], request_config: Any, timeout: float
) -> list[Any]:
    kwargs = {"infer_requests": requests, "request_config": request_config, "use_tqdm": False}
    method = "async_infer" if use_async else "infer"
    answer = connection.call({"type": "call", "method": method, "kwargs": kwargs}, timeout)
    if isinstance(answer, dict) and FAILURE in answer:
        error = RequestError if answer.get(REQUEST_FAULT) else WorkerError
        raise error(f"a replica failed: {answer[FAILURE]}")
    if not isinstance(answer, list):
        raise WorkerError(
            f"a replica gave no answer to {len(requests)} requests; the log of `swift rollout` "
            "tells why"
        )
    return answer
