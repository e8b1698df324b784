"""A table of faults: a run has the tokens of an undisturbed one, or it ends on every rank, with a
named cause and within its bound (F1 to F4)."""

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
from swift_grpo_ext.upstream.patches import PatchPhase, apply
from tests.rig.processes import free_port
from tests.rig.server.forked import (
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

TIMEOUT = 5.0
OF_ONE_THAT_STOPS = 1.5
BOUND = 10
"""Multiple of the timeout: a trainer waits three timeouts for each failed call."""

REPLICA_PHASES = {
    # phase: the method, and the number of its call with the fault
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
"""Phases in which a replica can give another answer, or load other weights."""

PLACES = (((2,), 0, 0), ((1, 1), 1, 0), ((1, 1), 0, 0), ((2,), 0, 1))
"""The replicas of each server, then the server and the replica with the fault. The first replica of
a server hosts the group of its weights."""


def cells() -> Iterator[tuple[str, Fault, tuple[int, ...], str]]:
    """Yield each action in each phase, at one place or two in turn, with a pattern of the error
    that ends every rank, or "" if the run goes on."""
    places = cycle(PLACES)
    for action in ("kill", "stop", "corrupt", *OF_CONNECTIONS):
        phases = CONNECTION_PHASES if action in OF_CONNECTIONS else REPLICA_PHASES
        for phase, (method, call) in phases.items():
            if action == "corrupt" and phase not in CORRUPTIBLE:
                continue
            error = ""
            if phase == "connecting":  # ms-swift's own phase, which it does not repeat
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
    apply(PatchPhase.SERVER)
    use_fork(monkeypatch)
    monkeypatch.setattr(client, "TRIES", client.TRIES.new(backoff_factor=0.01))
    monkeypatch.setattr(client, "SECONDS_BETWEEN_LOOKS", 0.02)
    with frozen():
        yield


def run(
    replicas: tuple[int, ...], fault: Fault | None, timeout: float, restarts: int = 0
) -> tuple[Outcome, list[EchoServer], set[int]]:
    """Return the outcome, the servers, and the process ids of the last round's replicas."""
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
    """A line in a store's socket would end every weight update."""
    logger = logging.getLogger("vllm")  # it logs that there is no NCCL
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
    """It gets the next weights and generates again, and tokens are the same."""
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
    """A replica that is lost again after its restart stays lost; the other one generates."""
    fault = Fault(action="kill", method="infer train", call=1, lives=2)
    outcome, [first], _ = run((2,), fault, TIMEOUT, restarts=1)
    assert outcome == undisturbed()
    assert [c.name for c in first.connections] == ["1.0"]
    assert first.restarts.num_awaited == 0
    assert len(first.every_process) == 3
