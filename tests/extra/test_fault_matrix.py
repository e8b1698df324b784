"""After any fault in any phase a run has the tokens of an undisturbed one, or it ends with a named
cause and within its bound (F1 to F4)."""

from __future__ import annotations

import pytest

from tests.rig.server.forked import Cell, cells, check


@pytest.mark.parametrize("cell", cells(in_pairs=False), ids=str)
def test_faults(cell: Cell) -> None:
    check(cell)
