"""What a run has logged: how far it is, how fast, and whether it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.tools.view.log import Log, read_log
from tests.tools.view.runs import add_logs


def test_a_run_waits_ends_and_goes_on(tmp_path: Path) -> None:
    assert read_log(tmp_path, Log()) == Log()
    assert (Log().step, Log().max_steps, Log().seconds, Log().updated) == (0, 0, {}, "")
    path = add_logs(tmp_path, 9.0, 2.0, 4.0)
    log = read_log(tmp_path, Log())
    assert (log.has_ended, log.step, log.max_steps) == (True, 3, 100)
    assert log.updated > "2026"
    # The first step is left out.
    assert {step: parts["step"] for step, parts in log.seconds.items()} == pytest.approx(
        {2: 2.0, 3: 4.0}
    )
    assert log.seconds[3]["generate"] == pytest.approx(1.2)
    assert read_log(tmp_path, log) is log
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 0.0, "global_step/max_steps": "4/100"}\n{"loss": 1')
    log = read_log(tmp_path, log)  # it was resumed, and a line is being written
    assert (log.has_ended, log.step) == (False, 4)
