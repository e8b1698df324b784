"""The replicas of a `swift rollout`: asked within a bounded time, and let go where they have ended.

Symptom: a replica that was killed answers every later request with an error while `/health` says
that all is well; one that hangs is waited for without limit.
Upstream: ms-swift 4.6, pipelines/infer/rollout.py, `SwiftRolloutDeploy.connections` and
`.processes`: a pipe and a process for each replica (one for all with the async engine).
Can go when ms-swift watches its workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from swift.utils import get_logger

from swift_grpo_ext.rollout.scheduler import balance

logger = get_logger()


FAILURE = "swift_grpo_ext.failure"
"""Key under which a replica answers why it failed, where ms-swift's would answer None."""


class ReplicaError(Exception):
    """A replica gave no usable answer, and lives on."""


class ReplicaLostError(ReplicaError):
    """A replica has ended, or does not answer."""


class NoReplicaError(ReplicaError):
    """No replica is left to ask; says what became of them."""


def prune(server: Any) -> None:
    """Let go of replicas that have ended."""
    for number in reversed(range(len(server.processes))):
        if not server.processes[number].is_alive():
            code = server.processes[number].exitcode
            let_go(server, server.connections[number], f"its process ended with status {code}")


def let_go(server: Any, connection: Any, cause: str) -> None:
    """End what is left of a replica, and ask it no more."""
    if connection not in server.connections:
        return
    number = server.connections.index(connection)
    server.connections.pop(number).close()
    process = server.processes.pop(number)
    process.kill()
    process.join()
    logger.error(
        f"A replica is lost ({cause}); {len(server.connections)} are left. Weights reach these "
        "once the trainer has connected to them anew."
    )


async def infer(
    server: Any,
    requests: Sequence[dict[str, Any]],
    request_config: Any,
    costs: Sequence[float],
    timeout: float,
) -> list[Any]:
    """Answers to `requests`, in their order. What one replica cannot answer, another is asked for.

    Args:
        costs: of the requests, for balance.
        timeout: seconds that a replica has for its share.

    Raises:
        NoReplicaError: names what became of the replicas.
    """
    answers: dict[int, Any] = {}
    failures: list[str] = []
    tried: list[Any] = []
    while len(answers) < len(requests):
        usable = [c for c in server.connections if c not in tried]
        if not usable:
            raise NoReplicaError("; ".join(failures) or "it has no replica left")
        left = [i for i in range(len(requests)) if i not in answers]
        shares = [
            [left[k] for k in share]
            for share in balance([costs[i] for i in left], [1.0] * len(usable))
        ]
        outcomes = await asyncio.gather(
            *(
                _ask(server, connection, [requests[i] for i in share], request_config, timeout)
                for connection, share in zip(usable, shares, strict=True)
            ),
            return_exceptions=True,
        )
        for connection, share, outcome in zip(usable, shares, outcomes, strict=True):
            if isinstance(outcome, ReplicaError):
                failures.append(str(outcome))
                tried.append(connection)
                if isinstance(outcome, ReplicaLostError):
                    let_go(server, connection, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers.update(zip(share, outcome, strict=True))
    return [answers[i] for i in range(len(requests))]


async def _ask(
    server: Any, connection: Any, requests: list[Any], request_config: Any, timeout: float
) -> list[Any]:
    if not requests:
        return []  # an idle replica is left alone
    kwargs = {"infer_requests": requests, "request_config": request_config, "use_tqdm": False}
    method = "async_infer" if server.use_async_engine else "infer"
    command = {"type": "call", "method": method, "kwargs": kwargs}
    answer = await asyncio.get_running_loop().run_in_executor(
        None, call, connection, command, timeout
    )
    if isinstance(answer, dict) and FAILURE in answer:
        raise ReplicaError(f"a replica failed: {answer[FAILURE]}")
    if not isinstance(answer, list) or len(answer) != len(requests):
        count = f"{len(answer)} answers" if isinstance(answer, list) else "no answer"
        raise ReplicaError(
            f"a replica gave {count} to {len(requests)} requests; the log of `swift rollout` tells "
            "why"
        )
    return answer


def call(connection: Any, command: dict[str, Any], timeout: float) -> Any:
    """What a replica answers to one of ms-swift's commands.

    Raises:
        ReplicaLostError: it has ended, or not answered for `timeout` seconds.
    """
    try:
        connection.send(command)
        if not connection.poll(timeout):
            raise ReplicaLostError(
                f"a replica has not answered for {timeout:g} s (--rollout_timeout)"
            )
        return connection.recv()
    except (EOFError, OSError) as e:
        raise ReplicaLostError(f"a replica has ended ({type(e).__name__})") from e
