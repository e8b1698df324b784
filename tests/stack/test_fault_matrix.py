"""After a fault a run has the tokens of an undisturbed one, or it ends with a named cause and
within its bound (F1 to F4). Each fault is in a few phases, and each phase has one fault or two.
`tests/extra/test_fault_matrix.py` has all other pairs."""

from __future__ import annotations

import pytest

from tests.rig.server.forked import (
    REPLICA_PHASES,
    Cell,
    Fault,
    cells,
    check,
    run,
    undisturbed,
)


@pytest.mark.parametrize("cell", cells(in_pairs=True), ids=str)
def test_faults(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize(
    ("phase", "replicas"), [("idle", (1,)), ("round", (1, 1)), ("loading", (2,))]
)
def test_a_replica_that_was_lost_comes_back(phase: str, replicas: tuple[int, ...]) -> None:
    """It gets the next weights and generates again, and tokens are the same (F4)."""
    method, _ = REPLICA_PHASES[phase]
    outcome, [first, *_], last_drew = run(replicas, Fault("kill", method), restarts=1)
    assert outcome == undisturbed()
    [connection] = [c for c in first.connections if c.number == 0]
    assert connection.name == "0.1"
    assert connection.holds_weights
    assert len(first.connections) == replicas[0]
    assert connection.process.pid in last_drew
