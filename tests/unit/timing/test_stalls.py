"""Reports of a run that hangs. `tests/stack/test_failures.py` has real processes."""

from __future__ import annotations

import threading
import time

import pytest

from swift_grpo_ext.timing import stalls
from swift_grpo_ext.timing.stalls import StallReports, waiting

BEFORE = [[7, "9 min in `loss`, at a"], [7, "9 min in `rewards`, at b"], None, [3, "2 min"]]
AFTER = [[9, "10 min in `loss`, at a"], [9, "10 min in `rewards`, at b; waits for c"], None]


def test_ranks_that_do_the_same_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks 2 and 5 did not answer, and rank 3 not between two reports."""
    reports, silent = StallReports(), BEFORE[3]
    reports._size = 6
    before, after = [*BEFORE, BEFORE[0], None], [*AFTER, silent, AFTER[0], None]
    reports._report(before, after)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "No part of the step has ended for 10 minutes.",
        "  ranks 0, 4: 10 min in `loss`, at a",
        "  rank 1: 10 min in `rewards`, at b; waits for c",
        "  ranks 2, 3, 5: no answer; stopped, or on a machine that is lost",
    ]
    reports._rank = 1  # rank 0 answers, and prints
    reports._report(before, after)
    assert not capsys.readouterr().err


def test_a_server_reports_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "MINUTES", 0.5 / 60)
    with StallReports():
        time.sleep(1.2)  # idle
        assert not capsys.readouterr().err
        ended = threading.Event()

        def wait() -> None:
            with waiting("replica 0.0: `infer`"):
                ended.wait(10)

        threading.Thread(target=wait).start()
        deadline = time.monotonic() + 10
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.1)
        ended.set()
    assert said.startswith("\nNo part of the step has ended for 0.00833333 minutes.\n")
    assert "  rank 0: waits for replica 0.0: `infer` (0 min)" in said
