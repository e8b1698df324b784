"""After any fault in any phase a run has the tokens of an undisturbed one, or it ends with a named
cause and within its bound (F1 to F4)."""

import pytest

from tests.rig.server.forked import Fault, check, faults


@pytest.mark.parametrize("fault", [*faults(in_stack=False)], ids=str)
def test_faults(fault: Fault) -> None:
    check(fault)
