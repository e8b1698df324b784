"""What a run has logged: how far it is, how fast, and whether it goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from swift_grpo_ext.tools.view.log import SILENT_SECONDS, Log, read_log
from tests.tools.view.runs import add_logs


def test_a_run_waits_lives_ends_and_falls_silent(tmp_path: Path) -> None:
    assert read_log(tmp_path, Log()) == Log()
    assert (Log().state, Log().step, Log().max_steps, Log().seconds) == ("waiting", 0, 0, None)
    path = add_logs(tmp_path, 9.0, 2.0, 4.0)
    log = read_log(tmp_path, Log())
    assert (log.state, log.step, log.max_steps) == ("ended", 3, 100)
    assert log.seconds == pytest.approx(3)  # the first step is left out
    assert read_log(tmp_path, log) is log
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 0.0, "global_step/max_steps": "4/100"}\n{"loss": 1')
    log = read_log(tmp_path, log)  # it was resumed, and a line is being written
    assert (log.state, log.step) == ("live", 4)
    before = time.time() - SILENT_SECONDS - 60
    os.utime(path, (before, before))
    log = read_log(tmp_path, log)
    assert (log.state, log.updated) == ("silent", pytest.approx(before))
