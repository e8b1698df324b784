"""Each fault in each phase of a training. A few cells are in `tests/stack`, all others in
`tests/extra`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

from tests.rig.server.forked import (
    OF_CONNECTIONS,
    SIGNALS,
    EchoServer,
    Fault,
    Outcome,
    Training,
    deployed,
    undisturbed,
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

PAIRS = {
    "kill": ("connecting", "weight update", "round"),
    "stop": ("loading", "evaluation", "idle"),
    "corrupt": ("loading", "reset of caches", "round"),
    "cut": ("connecting", "weight update", "loading", "evaluation"),
    "lose": ("naming itself", "reset of caches", "round"),
}
"""The phases of each fault in `tests/stack`: one or two of each kind; each phase is there."""

PLACES = (((2,), 0, 0), ((1, 1), 1, 0), ((1, 1), 0, 0), ((2,), 0, 1))
"""The replicas of each server, then the server and the replica with the fault. The first replica of
a server hosts the group of its weights."""


class Cell(NamedTuple):
    phase: str
    fault: Fault
    replicas: tuple[int, ...]
    error: str
    """A pattern of the error that ends the run; "" if it goes on."""

    def __str__(self) -> str:
        place = f"{self.fault.server}.{self.fault.replica}"
        return f"{self.fault.action} {self.phase} {len(self.replicas)}: {place}"


def cells(*, in_pairs: bool) -> Iterator[Cell]:
    """Yield the cells of `PAIRS` or all others: each fault at one place or two in turn."""
    places = cycle(PLACES)
    for action in (*SIGNALS, "corrupt", *OF_CONNECTIONS):
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
            for place in range(2 if is_twofold else 1):
                replicas, server, replica = next(places)
                if in_pairs == (phase in PAIRS[action] and place == 0):
                    where = Fault(action, method, call, replica=replica, server=server)
                    yield Cell(phase, where, replicas, error)


def run(
    replicas: tuple[int, ...], fault: Fault | None, timeout: float = TIMEOUT, restarts: int = 0
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

        training = Training(urls, timeout, between)
        return training.run(), running, training.drew


def check(cell: Cell) -> None:
    """Check that the run has the tokens of an undisturbed one, or that it ends with a named
    cause. Both are within the bound."""
    waits = cell.fault.action == "stop" or cell.phase == "connecting"
    timeout = OF_ONE_THAT_STOPS if waits else TIMEOUT
    began = time.monotonic()
    outcome, *_ = run(cell.replicas, cell.fault, timeout)
    assert time.monotonic() - began < BOUND * timeout
    if not cell.error:
        assert outcome == undisturbed()
    else:
        assert re.search(cell.error, str(outcome))
