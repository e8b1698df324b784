"""Requests over workers until each has its answer (docs/promises.md, F3 and F5). Pure.

The trainer's workers are servers, a server's workers are replicas. A worker that fails is not used
again in this round, and others answer its requests: seeds make their tokens the same (S2). A
request that was with `MOST_LOST` workers when these were lost goes to no other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swift_grpo_ext.upstream.rows import COLUMNS

Worker = TypeVar("Worker", bound=Hashable)
T = TypeVar("T")

MOST_LOST = 2
CHARACTERS_PER_TOKEN = 4
TOKENS_PER_MEDIUM = 1000  # a photograph of 1024 x 1024 pixels has 1,369 in Qwen2.5-VL


class WorkerError(RuntimeError):
    """A worker gave no usable answer, and lives on."""


class WorkerLostError(WorkerError):
    """A worker has ended, or does not answer."""


class NoWorkerError(WorkerError):
    """No worker is left; says what became of them."""


class RequestError(ValueError):
    """A request is at fault itself: no other worker gets it."""


# In the reply of a replica that failed: why, and whether the request itself is at fault.
FAILURE = "swift_grpo_ext.failure"
REQUEST_FAULT = "swift_grpo_ext.request_fault"


def dispatch(
    costs: Sequence[float],
    workers: Callable[[], Mapping[Worker, float]],
    send: Callable[[Worker, list[int]], Sequence[T]],
    on_failure: Callable[[Worker, WorkerError], None],
) -> list[T]:
    """Return the answers to all requests, in their order.

    `workers` returns those that are left, with their relative speeds; it is called before each try.
    `send` gives a worker requests by their numbers, and runs in a thread of its own.

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
            raise NoWorkerError("; ".join(map(str, failures.values())))
        left = [i for i in range(len(costs)) if i not in answers]
        shares = balance([costs[i] for i in left], list(usable.values()))
        # A try ends with its slowest worker; the next one spreads what has failed.
        with ThreadPoolExecutor(len(usable)) as pool:
            sent = []
            for worker, share in zip(usable, shares, strict=True):
                if share:
                    numbers = [left[k] for k in share]
                    sent.append((worker, numbers, pool.submit(send, worker, numbers)))
        for worker, numbers, outcome in sent:
            try:
                answers.update(zip(numbers, outcome.result(), strict=True))
            except WorkerError as e:
                failures[worker] = e
                on_failure(worker, e)
                if isinstance(e, WorkerLostError):
                    losses.update(numbers)  # any of them may have ended the worker
        suspects = [str(i) for i in sorted(losses) if losses[i] >= MOST_LOST]
        if suspects:
            raise RequestError(
                f"requests {', '.join(suspects)} of the batch were with {MOST_LOST} workers when "
                f"these were lost, and are given to no other: "
                f"{'; '.join(map(str, failures.values()))}"
            )
    return [answers[i] for i in range(len(costs))]


def balance(costs: Sequence[float], capacities: Sequence[float]) -> list[list[int]]:
    """Return for each worker the indices of its requests, in their order (G5). `capacities` are the
    workers' relative speeds; a server's is the number of its replicas.

    The costliest request comes first, and each goes to the worker that would be done with it
    soonest: equal workers are done after at most 4/3 of the best possible time (LPT: R. L. Graham,
    Bounds on multiprocessing timing anomalies, 1969).
    """
    done_at = [0.0] * len(capacities)
    shares: list[list[int]] = [[] for _ in capacities]
    for request in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost = costs[request]
        ends = [done + cost / speed for done, speed in zip(done_at, capacities, strict=True)]
        chosen = ends.index(min(ends))
        done_at[chosen] = ends[chosen]
        shares[chosen].append(request)
    return [sorted(share) for share in shares]


def estimate_cost(request: Mapping[str, Any], count: int, max_tokens: int) -> float:
    """Return the tokens of a request: its prompt's, estimated, and those of `count` completions
    that reach their limit."""
    tokens: float = TOKENS_PER_MEDIUM * sum(len(request.get(name) or ()) for name in COLUMNS)
    for message in request.get("messages") or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                tokens += len(text) / CHARACTERS_PER_TOKEN
            elif isinstance(text, int):  # a token of an earlier answer
                tokens += 1
            elif part and len(part) > 1:  # else the part stands for a medium in one of the columns
                tokens += TOKENS_PER_MEDIUM
    return tokens + count * max_tokens
