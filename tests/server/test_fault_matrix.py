"""Faults from a table: the run ends with the tokens of an undisturbed one, or on every rank, by
name, within its bound (F1 to F4)."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_grpo_ext.server import client, routes
from tests.server.fault_table import OF_REPLICAS, Cell, Fault, cells, markdown
from tests.server.forked import RANKS, EchoServer, Outcome, Training, deployed, frozen, use_fork
from tests.stack.processes import free_port

TIMEOUT = 5.0
OF_ONE_THAT_STOPS = 1.5
BOUND = 10
"""Times the timeout: a trainer waits three for each call that fails."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    routes.install()
    use_fork(monkeypatch)
    monkeypatch.setattr(client, "BACKOFF", (0.01, 0.02, 0.04))
    monkeypatch.setattr(client, "SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    with frozen():
        yield


def run(
    replicas: tuple[int, ...], fault: Fault | None, timeout: float, restarts: int = 0
) -> tuple[Outcome, list[EchoServer], set[int]]:
    """What each rank's run came to, the servers of it, and the process ids of the replicas that
    drew its last round."""
    with deployed(replicas, timeout, fault, restarts) as (running, urls):

        def between(step: int) -> None:
            if fault and fault.method == "idle" and step == 0:
                process = running[fault.server].processes[fault.replica]
                os.kill(process.pid, SIGNALS[fault.action])
            deadline = time.monotonic() + timeout
            for starting in (c for one in running for c in one.restarts.starting):
                while not starting.poll() and time.monotonic() < deadline:
                    time.sleep(0.01)

        training = Training(urls, [free_port() for _ in urls], timeout, between)
        outcome = training.run()
        return outcome, running, training.drew.get(max(training.drew, default=0), set())


_undisturbed: list[Outcome] = []


def undisturbed() -> Outcome:
    if not _undisturbed:
        outcome, *_ = run((1,), None, TIMEOUT)
        assert [len(tokens) for tokens in outcome] == [24] * RANKS, outcome
        _undisturbed.append(outcome)
    return _undisturbed[0]


def assert_cell(cell: Cell, outcome: Outcome) -> None:
    if not cell.error:
        assert outcome == undisturbed()
        return
    assert len(outcome) == RANKS
    for error in outcome:
        assert isinstance(error, str)
        assert re.search(cell.error, error), error


@pytest.mark.stack
@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_faults(cell: Cell) -> None:
    waits = cell.fault.action == "stop" or (cell.phase == "connecting" and bool(cell.error))
    timeout = OF_ONE_THAT_STOPS if waits else TIMEOUT
    expected = undisturbed()
    began = time.monotonic()
    outcome, *_ = run(cell.replicas, cell.fault, timeout)
    assert time.monotonic() - began < BOUND * timeout
    assert expected is undisturbed()
    assert_cell(cell, outcome)


# --- replicas come back (F4) ---


@pytest.mark.stack
@pytest.mark.parametrize(
    ("phase", "replicas"), [("round", (2,)), ("idle", (1,)), ("round", (1, 1)), ("loading", (2,))]
)
def test_a_replica_that_was_lost_comes_back(phase: str, replicas: tuple[int, ...]) -> None:
    """With the next weights; it draws again, and the tokens are the same."""
    method, _ = OF_REPLICAS[phase]
    fault = Fault(action="kill", method=method, call=1)
    outcome, [first, *_], last_drew = run(replicas, fault, TIMEOUT, restarts=1)
    assert outcome == undisturbed()
    [connection] = [c for c in first.connections if c.number == 0]
    assert connection.name == "0.1"
    assert connection.holds_weights
    assert len(first.connections) == replicas[0]
    assert connection.process.pid in last_drew


@pytest.mark.stack
def test_restarts_end_with_their_budget() -> None:
    """One that is lost again after its second start stays lost; the other draws."""
    fault = Fault(action="kill", method="infer train", call=1, lives=2)
    outcome, [first], _ = run((2,), fault, TIMEOUT, restarts=1)
    assert outcome == undisturbed()
    assert [c.name for c in first.connections] == ["1.0"]
    assert first.restarts.num_awaited == 0
    assert len(first.every_process) == 3


@pytest.mark.parametrize(("page", "chinese"), [("launching", False), ("launching_CN", True)])
def test_the_page_holds_the_table(page: str, chinese: bool) -> None:
    """`python -m tests.server.fault_table` prints it."""
    text = (Path(__file__).parents[2] / f"docs/{page}.md").read_text(encoding="utf-8")
    assert markdown(chinese=chinese) in text


def test_the_table_has_every_kind_of_cell() -> None:
    every = list(cells())
    assert len(every) >= 40
    assert len(set(map(str, every))) == len(every)
    places = {(len(c.replicas), c.fault.server, c.fault.replica) for c in every}
    assert places == {(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0)}
