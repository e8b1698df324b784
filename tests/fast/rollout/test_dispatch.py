"""Requests are spread over workers by cost and speed, and others answer for workers that fail (G5,
F3, F5)."""

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swift_grpo_ext.rollout.dispatch import (
    NoWorkerError,
    RequestError,
    WorkerError,
    WorkerLostError,
    balance,
    dispatch,
    estimate_cost,
)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
)
def test_every_request_is_served_once(costs: list[int], capacities: list[float]) -> None:
    """No replica waits longer than for one request, also if replicas differ in speed."""
    shares = balance(costs, capacities)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    ends = [load / speed for load, speed in zip(loads, capacities, strict=True)]
    assert max(ends) - min(ends) <= max(costs) / min(capacities) + 1e-9


FATES = st.lists(st.sampled_from([None, WorkerError, WorkerLostError, RequestError]), max_size=3)


@given(st.lists(FATES, max_size=6), st.integers(0, 9))
@example([[WorkerLostError], [WorkerLostError], []], 1)
@example([[WorkerLostError], [None, WorkerLostError]], 4)
def test_no_sample_is_lost_or_doubled_whichever_workers_fail(
    fates: list[list[type[Exception] | None]], num_requests: int
) -> None:
    """`fates` has the outcome of each worker's calls; later calls succeed."""
    outcomes = {worker: iter(of_one) for worker, of_one in enumerate(fates)}
    living = dict.fromkeys(outcomes, 1.0)
    failed: list[int] = []
    shares: dict[type[Exception] | None, list[int]] = defaultdict(list)
    refused: list[str] = []

    def send(worker: int, share: list[int]) -> list[tuple[int, int]]:
        assert share, "an idle worker is left alone"
        assert worker not in failed, "a worker that failed is used again"
        outcome = next(outcomes[worker], None)
        shares[outcome].extend(share)
        if outcome is None:
            return [(worker, i) for i in share]
        if outcome is RequestError:
            refused.append(f"{worker} failed")
        raise outcome(f"{worker} failed")

    def on_failure(worker: int, error: WorkerError) -> None:
        assert str(error) == f"{worker} failed"
        failed.append(worker)
        if isinstance(error, WorkerLostError):
            del living[worker]

    answers: list[tuple[int, int]] = []
    error: Exception | None = None
    try:
        answers = dispatch([1.0] * num_requests, lambda: living, send, on_failure)
    except (NoWorkerError, RequestError) as e:
        error = e
    causes = "; ".join(f"{worker} failed" for worker in failed)
    lost = Counter(shares[WorkerLostError])
    suspects = [str(i) for i in sorted(lost) if lost[i] > 1]  # were with two lost workers
    assert isinstance(error, RequestError) == bool(refused or suspects)
    if refused:
        assert str(error) in refused
    elif suspects:
        assert str(error).startswith(f"requests {', '.join(suspects)} of the batch were with 2 ")
        assert str(error).endswith(causes)
    elif error is not None:
        assert (sorted(failed), str(error)) == (list(outcomes), causes)
    else:
        assert [i for _, i in answers] == list(range(num_requests))
    assert len({*shares[None]}) == len(shares[None])
    assert max(lost.values(), default=0) <= 2


PARTS = [
    {"type": "text", "text": "词" * 400},
    {"type": "image_url", "image_url": {"url": "a.png"}},
    {"type": "image"},  # stands for an image of the column
]
PROMPT: dict[str, Any] = {"messages": [{"role": "user", "content": "词" * 400}]}


@pytest.mark.parametrize(
    ("request_", "count", "max_tokens", "tokens"),
    [
        (PROMPT, 8, 256, 2148),
        ({"messages": [{"role": "assistant", "content": None}]}, 1, 10, 10),
        ({"images": ["a.png", {"path": "b.png"}], "videos": ["c.mp4"]}, 1, 0, 3000),
        ({**PROMPT, "audios": ["a.mp3"]}, 2, 5, 1110),
        ({"messages": [{"content": PARTS}], "images": ["b.png"]}, 1, 0, 2100),
    ],
)
def test_costs_by_example(
    request_: dict[str, Any], count: int, max_tokens: int, tokens: float
) -> None:
    assert estimate_cost(request_, count, max_tokens) == tokens
