"""Each promise of docs/promises.md is named by a test that proves it. Each run of the suite proves
that it passes on the run's machine (I3); `scripts/bench/record.py` measures the costs (V4)."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT


def test_each_promise_has_a_test() -> None:
    """If not, name its id in the docstring of the test that proves it."""
    command = [sys.executable, str(ROOT / "scripts/dev/promises.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    missing = [line for line in done.stdout.splitlines() if line.endswith("| none |")]
    assert (done.returncode, missing) == (0, []), done.stderr
