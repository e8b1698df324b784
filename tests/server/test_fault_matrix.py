"""Faults from a table: the run ends with the tokens of an undisturbed one, or on every rank, by
name, within its bound (F1 to F4)."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest

from swift_grpo_ext.server import client
from swift_grpo_ext.upstream.patches import Moment, apply
from tests.server.forked import (
    OF_CONNECTIONS,
    RANKS,
    SIGNALS,
    EchoServer,
    Fault,
    Outcome,
    Training,
    deployed,
    frozen,
    use_fork,
)
from tests.stack.processes import free_port

pytestmark = pytest.mark.stack

TIMEOUT = 5.0
OF_ONE_THAT_STOPS = 1.5
BOUND = 10
"""Times the timeout: a trainer waits three for each call that fails."""

REPLICA_PHASES = {
    # phase: the method and the call of it that meet the fault
    "connecting": ("join_group", 1),
    "weight update": ("update_flattened_params", 3),
    "loading": ("process_weights_after_loading", 2),
    "reset of caches": ("reset_prefix_cache", 2),
    "round": ("infer train", 2),
    "evaluation": ("infer eval", 1),
    "idle": ("idle", 1),
}
CONNECTION_PHASES = {
    "connecting": ("init_communicator", 1),
    "naming itself": ("get_engine_type", 2),
    "weight update": ("update_flattened_params", 3),
    "loading": ("process_weights_after_loading", 2),
    "reset of caches": ("reset_prefix_cache", 2),
    "round": ("infer", 2),
    "evaluation": ("infer", 3),
}
CORRUPTIBLE = ("loading", "reset of caches", "round", "evaluation")
"""Phases in which a replica's answer, or what it loads, can be another one."""

PLACES = (((2,), 0, 0), ((1, 1), 1, 0), ((1, 1), 0, 0), ((2,), 0, 1))
"""Replicas of each server, and the server and the replica that meet the fault. Of a server's
replicas the first is the host of the weights' group."""


def cells() -> Iterator[tuple[str, Fault, tuple[int, ...], str]]:
    """Each action in each phase, at one place or two, which take turns; with words of the error
    that ends every rank, "" where the run goes on."""
    places = cycle(PLACES)
    for action in ("kill", "stop", "corrupt", *OF_CONNECTIONS):
        phases = CONNECTION_PHASES if action in OF_CONNECTIONS else REPLICA_PHASES
        for phase, (method, call) in phases.items():
            if action == "corrupt" and phase not in CORRUPTIBLE:
                continue
            error = ""
            if phase == "connecting":  # before plugins are there; ms-swift does not try again
                cut = action in OF_CONNECTIONS
                error = "Connection aborted" if cut else "timed out|has not answered"
            elif (action, phase) == ("corrupt", "loading"):
                error = "does not hold the trainer's weights"
            is_twofold = action in ("kill", "corrupt") or (action, phase) == (
                "stop",
                "weight update",
            )
            for _ in range(2 if is_twofold else 1):
                replicas, server, replica = next(places)
                fault = Fault(
                    action=action, method=method, call=call, replica=replica, server=server
                )
                yield phase, fault, replicas, error


def name(cell: tuple[str, Fault, tuple[int, ...], str]) -> str:
    phase, fault, replicas, _ = cell
    return f"{fault.action} {phase} {len(replicas)}: {fault.server}.{fault.replica}"


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    apply(Moment.SERVER)
    use_fork(monkeypatch)
    monkeypatch.setattr(client, "TRIES", client.TRIES.new(backoff_factor=0.01))
    monkeypatch.setattr(client, "SECONDS_BETWEEN_LOOKS", 0.02)
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


@pytest.mark.parametrize("cell", list(cells()), ids=name)
def test_faults(cell: tuple[str, Fault, tuple[int, ...], str]) -> None:
    phase, fault, replicas, error = cell
    waits = fault.action == "stop" or phase == "connecting"
    timeout = OF_ONE_THAT_STOPS if waits else TIMEOUT
    expected = undisturbed()
    began = time.monotonic()
    outcome, *_ = run(replicas, fault, timeout)
    assert time.monotonic() - began < BOUND * timeout
    if not error:
        assert outcome == expected
    else:
        assert [bool(re.search(error, str(end))) for end in outcome] == [True] * RANKS, outcome


def test_no_logger_of_this_process_writes_to_a_replicas_sockets() -> None:
    """Whatever numbers its files have: a line in a store's socket would end every weight update."""
    logger = logging.getLogger("vllm")  # which tells that there is no NCCL
    with ExitStack() as files:
        for _ in range(16):
            file = files.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            handler = logging.StreamHandler(file)
            logger.addHandler(handler)
            files.callback(logger.removeHandler, handler)
        outcome, *_ = run((1,), None, TIMEOUT)
    assert [len(tokens) for tokens in outcome] == [24] * RANKS, outcome


# --- replicas come back (F4) ---


@pytest.mark.parametrize(
    ("phase", "replicas"), [("round", (2,)), ("idle", (1,)), ("round", (1, 1)), ("loading", (2,))]
)
def test_a_replica_that_was_lost_comes_back(phase: str, replicas: tuple[int, ...]) -> None:
    """With the next weights; it draws again, and the tokens are the same."""
    method, _ = REPLICA_PHASES[phase]
    fault = Fault(action="kill", method=method, call=1)
    outcome, [first, *_], last_drew = run(replicas, fault, TIMEOUT, restarts=1)
    assert outcome == undisturbed()
    [connection] = [c for c in first.connections if c.number == 0]
    assert connection.name == "0.1"
    assert connection.holds_weights
    assert len(first.connections) == replicas[0]
    assert connection.process.pid in last_drew


def test_restarts_end_with_their_budget() -> None:
    """One that is lost again after its second start stays lost; the other draws."""
    fault = Fault(action="kill", method="infer train", call=1, lives=2)
    outcome, [first], _ = run((2,), fault, TIMEOUT, restarts=1)
    assert outcome == undisturbed()
    assert [c.name for c in first.connections] == ["1.0"]
    assert first.restarts.num_awaited == 0
    assert len(first.every_process) == 3
