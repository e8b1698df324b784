"""Requests are spread evenly over workers (G5), and go to others when workers fail (F3, F5)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
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

# --- the balance ---


@pytest.mark.parametrize(
    ("costs", "capacities", "expected"),
    [
        ([1, 1, 8, 1, 5], [1.0, 1.0], [[2], [0, 1, 3, 4]]),
        ([1, 1, 1, 1, 1, 1], [1.0, 2.0], [[1, 4], [0, 2, 3, 5]]),
        ([4, 4], [1.0, 4.0], [[], [0, 1]]),
    ],
)
def test_shares_by_example(
    costs: list[float], capacities: list[float], expected: list[list[int]]
) -> None:
    assert balance(costs, capacities) == expected


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
)
def test_every_request_is_served_once_and_no_replica_waits_longer_than_one(
    costs: list[int], capacities: list[float]
) -> None:
    """Also if replicas differ in speed."""
    shares = balance(costs, capacities)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[i] for i in share) for share in shares]
    ends = [load / speed for load, speed in zip(loads, capacities, strict=True)]
    assert max(ends) - min(ends) <= max(costs) / min(capacities) + 1e-9


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
        ({"messages": [{"role": "user", "content": [1] * 400}]}, 1, 0, 400),
        ({"images": ["a.png", {"path": "b.png"}], "videos": ["c.mp4"]}, 1, 0, 3000),
        ({**PROMPT, "audios": ["a.mp3"]}, 2, 5, 1110),
        ({"messages": [{"content": PARTS}], "images": ["b.png"]}, 1, 0, 2100),
    ],
)
def test_costs_by_example(
    request_: dict[str, Any], count: int, max_tokens: int, tokens: float
) -> None:
    assert estimate_cost(request_, count, max_tokens) == tokens


# --- workers that fail ---


class Workers:
    """Workers by name; `fails` has the errors of those that always fail."""

    def __init__(self, names: str, **fails: Exception) -> None:
        self.speeds = dict.fromkeys(names, 1.0)
        self.sent: list[tuple[str, list[int]]] = []
        self.failures: list[tuple[str, str]] = []
        self._fails = fails
        self._lock = threading.Lock()

    def send(self, worker: str, share: list[int]) -> list[str]:
        with self._lock:
            self.sent.append((worker, share))
        if worker in self._fails:
            raise self._fails[worker]
        return [f"{worker}{i}" for i in share]

    def on_failure(self, worker: str, error: WorkerError) -> None:
        self.failures.append((worker, str(error)))
        if isinstance(error, WorkerLostError):
            del self.speeds[worker]

    def dispatch(self, costs: list[float]) -> list[Any]:
        return dispatch(costs, lambda: self.speeds, self.send, self.on_failure)


def test_all_workers_share_the_requests_by_cost_and_speed() -> None:
    workers = Workers("ab")
    workers.speeds = {"a": 1.0, "b": 3.0}
    assert workers.dispatch([1, 1, 8, 1]) == ["a0", "a1", "b2", "a3"]
    assert Workers("").dispatch([]) == []
    idle = Workers("abc")
    idle.dispatch([1.0])
    assert idle.sent == [("a", [0])]


@pytest.mark.parametrize("error", [WorkerError("full"), WorkerLostError("gone")])
def test_others_answer_for_one_that_fails(error: WorkerError) -> None:
    workers = Workers("abc", a=error)
    answers = workers.dispatch([1.0] * 6)
    assert [answer[1] for answer in answers] == list("012345")
    assert "a" not in {answer[0] for answer in answers}
    assert workers.failures == [("a", str(error))]
    assert [worker for worker, _ in workers.sent].count("a") == 1


def test_with_none_left_the_causes_are_named() -> None:
    workers = Workers("ab", a=WorkerError("full"), b=WorkerError("broken"))
    with pytest.raises(NoWorkerError, match=r"^full; broken$"):
        workers.dispatch([1.0, 1.0])


def test_a_request_is_with_at_most_two_workers_that_are_lost() -> None:
    """Workers that live on, and workers lost with other requests, do not count."""
    lost = {name: WorkerLostError(name) for name in "ab"}
    workers = Workers("abc", **lost)
    with pytest.raises(RequestError, match=r"^requests 0 of the batch were with 2 .*: a; b$"):
        workers.dispatch([1.0])
    assert [worker for worker, _ in workers.sent] == ["a", "b"]
    assert Workers("ab", a=WorkerLostError("a")).dispatch([1.0]) == ["b0"]
    assert Workers("abc", **lost).dispatch([1.0] * 3) == ["c0", "c1", "c2"]
    failing = {name: WorkerError(name) for name in "abc"}
    assert Workers("abcd", **failing).dispatch([1.0]) == ["d0"]


def test_a_request_at_fault_ends_the_dispatch() -> None:
    workers = Workers("ab", a=RequestError("no messages"))
    with pytest.raises(RequestError, match="no messages"):
        workers.dispatch([1.0])
    assert workers.sent == [("a", [0])]
    assert workers.failures == []
