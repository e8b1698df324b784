"""After a fault a run has the tokens of an undisturbed one, or it ends with a named cause and
within its bound (F1 to F4). Each fault is in a few phases, and each phase has one fault or two.
`tests/extra/test_fault_matrix.py` has all other pairs."""

from __future__ import annotations

import pytest

from tests.rig.server.forked import Fault, check, faults


@pytest.mark.parametrize("fault", [*faults(in_stack=True)], ids=str)
def test_faults(fault: Fault) -> None:
    check(fault)
