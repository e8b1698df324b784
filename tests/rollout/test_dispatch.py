"""Requests over workers that fail: which of them gets which request, and when it ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from swift_grpo_ext.rollout.dispatch import (
    NoWorkerError,
    RequestError,
    WorkerError,
    WorkerLostError,
    dispatch,
)


class Workers:
    """Workers by name; `fails` has the error of each that fails, always."""

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

    def dispatch(self, costs: list[float], addresses: Sequence[str | None] = ()) -> list[Any]:
        return dispatch(costs, lambda: self.speeds, self.send, self.on_failure, addresses)


def test_all_workers_share_the_requests_by_cost_and_speed() -> None:
    workers = Workers("ab")
    assert workers.dispatch([1, 1, 8, 1]) == ["b0", "b1", "a2", "b3"]
    workers.speeds = {"a": 1.0, "b": 3.0}
    assert [answer[0] for answer in workers.dispatch([1.0] * 4)] == ["b", "b", "a", "b"]
    assert workers.dispatch([]) == []
    assert Workers("").dispatch([]) == []


def test_an_addressed_request_goes_to_its_worker_whatever_it_costs() -> None:
    """The others are spread around it."""
    assert Workers("abc").dispatch([9, 1, 1], "cca") == ["c0", "c1", "a2"]
    addresses = [None, "a", None, None]
    assert Workers("ab").dispatch([3, 9, 1, 1], addresses) == ["b0", "a1", "b2", "b3"]


def test_another_draws_an_addressed_request_where_its_worker_cannot() -> None:
    assert Workers("ab").dispatch([1], ["c"]) == ["a0"]
    for error in (WorkerError("full"), WorkerLostError("gone")):
        assert Workers("ab", b=error).dispatch([1, 1], "ba") == ["a0", "a1"]


def test_an_idle_worker_gets_nothing() -> None:
    workers = Workers("abc")
    workers.dispatch([1.0])
    assert workers.sent == [("a", [0])]


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
    with pytest.raises(NoWorkerError, match="no worker is left"):
        Workers("").dispatch([1.0])


def test_a_worker_that_fails_but_lives_does_not_count_against_a_request() -> None:
    failing = {name: WorkerError(name) for name in "abc"}
    assert Workers("abcd", **failing).dispatch([1.0]) == ["d0"]


def test_a_request_is_with_at_most_two_workers_that_are_lost() -> None:
    lost = {name: WorkerLostError(name) for name in "ab"}
    workers = Workers("abc", **lost)
    with pytest.raises(RequestError, match=r"^requests 0 of the batch were with 2 .*: a; b$"):
        workers.dispatch([1.0])
    assert [worker for worker, _ in workers.sent] == ["a", "b"]
    one = Workers("ab", a=WorkerLostError("a"))
    assert one.dispatch([1.0]) == ["b0"]


def test_losses_are_counted_by_request() -> None:
    """Two workers lost at once were with different requests."""
    lost = {name: WorkerLostError(name) for name in "ab"}
    assert Workers("abc", **lost).dispatch([1.0] * 3) == ["c0", "c1", "c2"]


def test_a_request_at_fault_ends_the_dispatch() -> None:
    workers = Workers("ab", a=RequestError("no messages"))
    with pytest.raises(RequestError, match="no messages"):
        workers.dispatch([1.0])
    assert workers.sent == [("a", [0])]
    assert workers.failures == []
