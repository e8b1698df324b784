"""Distributes requests over workers, and retries failed ones (docs/promises.md, F3 and F5). Pure.

The trainer's workers are servers; a server's workers are replicas. A worker that fails is not used
again in this round. Other workers answer its requests, with the same tokens due to seeds (S2). A
request is not retried after `MOST_LOST` workers were lost with it.
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
    """A worker gave no usable answer, but is alive."""


class WorkerLostError(WorkerError):
    """A worker has ended, or does not answer."""


class NoWorkerError(WorkerError):
    """No worker is left; the message has the failure of each."""


class RequestError(ValueError):
    """The request itself is invalid: it is not retried."""


# Keys in the reply of a failed replica: the reason, and whether the request is invalid.
FAILURE = "swift_grpo_ext.failure"
REQUEST_FAULT = "swift_grpo_ext.request_fault"


def dispatch(
    costs: Sequence[float],
    workers: Callable[[], Mapping[Worker, float]],
    send: Callable[[Worker, list[int]], Sequence[T]],
    on_failure: Callable[[Worker, WorkerError], None],
) -> list[T]:
    """Return the answers to all requests, in their order.

    `workers` returns the living workers with their relative speeds, and is called before each
    attempt. `send` sends a worker the requests with these indices, in a thread of its own.

    Raises:
        NoWorkerError: all workers have failed.
        RequestError: `send` raised it, or `MOST_LOST` workers died with the same request.
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
        # An attempt ends with its slowest worker; the next attempt has the failed requests.
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
                    losses.update(numbers)  # any of these requests may have killed the worker
        suspects = [str(i) for i in sorted(losses) if losses[i] >= MOST_LOST]
        if suspects:
            raise RequestError(
                f"requests {', '.join(suspects)} of the batch were with {MOST_LOST} workers when "
                f"these were lost, and are not retried: "
                f"{'; '.join(map(str, failures.values()))}"
            )
    return [answers[i] for i in range(len(costs))]


def balance(costs: Sequence[float], capacities: Sequence[float]) -> list[list[int]]:
    """Return for each worker the sorted indices of its requests (G5). `capacities` are the workers'
    relative speeds; a server's is the number of its replicas.

    Requests are assigned by falling cost, each to the worker that would finish it first. Equal
    workers need at most 4/3 of the optimal time (LPT: R. L. Graham, Bounds on multiprocessing
    timing anomalies, 1969).
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
    """Return the cost of a request in tokens: an estimate of its prompt, plus `count` completions
    of maximum length."""
    tokens: float = TOKENS_PER_MEDIUM * sum(len(request.get(name) or ()) for name in COLUMNS)
    for message in request.get("messages") or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                tokens += len(text) / CHARACTERS_PER_TOKEN
            elif isinstance(text, int):  # a token of an earlier answer
                tokens += 1
            elif part and len(part) > 1:  # a medium; `{"type": "image"}` refers to one in a column
                tokens += TOKENS_PER_MEDIUM
    return tokens + count * max_tokens
