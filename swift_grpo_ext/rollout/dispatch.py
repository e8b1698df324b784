"""Requests over workers until each has its answer (SPEC F3, F5). Pure.

The trainer's workers are servers, a server's workers are replicas. A worker that fails is not used
again in this round, and others answer its requests: seeds make their tokens the same (SPEC S2). A
request that was with `MOST_LOST` workers when these were lost is given to no other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from swift_grpo_ext.rollout.scheduler import balance

Worker = TypeVar("Worker", bound=Hashable)
T = TypeVar("T")

MOST_LOST = 2


class WorkerError(RuntimeError):
    """A worker gave no usable answer, and lives on."""


class WorkerLostError(WorkerError):
    """A worker has ended, or does not answer."""


class NoWorkerError(WorkerError):
    """No worker is left; says what became of them."""


class RequestError(ValueError):
    """A request is at fault itself: no other worker gets it."""


def dispatch(
    costs: Sequence[float],
    workers: Callable[[], Mapping[Worker, float]],
    send: Callable[[Worker, list[int]], Sequence[T]],
    on_failure: Callable[[Worker, WorkerError], None],
) -> list[T]:
    """The answers to all requests, in their order.

    Args:
        costs: of the requests, for the balance between workers (SPEC G5).
        workers: those that are left, with their relative speeds; called before each try.
        send: gives a worker some requests, by their numbers; runs in a thread of its own.
        on_failure: learns of each worker that failed.

    Raises:
        NoWorkerError: no worker is left that has not failed.
        RequestError: `send` raised it, or a request was with too many workers that were lost.
    """
    answers: dict[int, T] = {}
    failures: dict[Worker, WorkerError] = {}
    losses: Counter[int] = Counter()
    while len(answers) < len(costs):
        usable = {w: speed for w, speed in workers().items() if w not in failures}
        if not usable:
            raise NoWorkerError("; ".join(map(str, failures.values())) or "no worker is left")
        left = [i for i in range(len(costs)) if i not in answers]
        shares = [
            [left[k] for k in share]
            for share in balance([costs[i] for i in left], list(usable.values()))
        ]
        for worker, share, outcome in _send_all(list(usable), shares, send):
            if not isinstance(outcome, WorkerError):
                answers.update(zip(share, outcome, strict=True))
                continue
            failures[worker] = outcome
            on_failure(worker, outcome)
            if isinstance(outcome, WorkerLostError):
                losses.update(share)
        _check_losses(losses, failures.values())
    return [answers[i] for i in range(len(costs))]


def _send_all(
    workers: list[Worker],
    shares: list[list[int]],
    send: Callable[[Worker, list[int]], Sequence[T]],
) -> list[tuple[Worker, list[int], Sequence[T] | WorkerError]]:
    def attempt(worker: Worker, share: list[int]) -> Sequence[T] | WorkerError:
        try:
            return send(worker, share) if share else []  # an idle worker is left alone
        except WorkerError as e:
            return e

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(zip(workers, shares, pool.map(attempt, workers, shares), strict=True))


def _check_losses(losses: Mapping[int, int], failures: object) -> None:
    suspects = [i for i, count in losses.items() if count >= MOST_LOST]
    if suspects:
        causes = "; ".join(map(str, failures))  # type: ignore[call-overload]
        raise RequestError(
            f"requests {', '.join(map(str, sorted(suspects)))} of the batch were with {MOST_LOST} "
            f"workers when these were lost, and are given to no other: {causes}"
        )
