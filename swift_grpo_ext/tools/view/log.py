"""Reads what a run has logged: its steps, how fast they are, and whether it goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from swift_grpo_ext.timing import PARTS
from swift_grpo_ext.tools.updates import LOGS, STEP, by_step, read_logs

LAST_STEPS = 20
"""Steps at the end of a run over which its reward and its seconds are averaged."""

SILENT_SECONDS, SILENT_STEPS = 300.0, 10
"""A run may have stopped if it has logged nothing for these seconds, and for the time of these
steps."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A run's `logging.jsonl` as it was read."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The logged values of each optimizer step, as `by_step` returns them."""

    version: tuple[int, int] = (0, 0)
    """When the file was written last, in nanoseconds since 1970, and its size; 0 before it is
    there."""

    has_ended: bool = False
    """True if ms-swift logged the training's end, and no step after it."""

    @property
    def step(self) -> int:
        """The last step."""
        return max(self.steps, default=0)

    @property
    def max_steps(self) -> int:
        """How many steps the training has in all; 0 before its first."""
        last = self.steps.get(self.step, {})
        return int(str(last.get(STEP, "0/0")).rpartition("/")[2])

    @property
    def updated(self) -> float:
        """When the file was written last, in seconds since 1970."""
        return self.version[0] / 1e9

    @property
    def seconds(self) -> float | None:
        """The mean seconds of the last steps. The first step is left out: a run begins with what it
        does once. None before the second."""
        timed = [log for log in self.steps.values() if "time/rollout" in log][1:]
        seconds = [sum(log[f"time/{part}"] for part in PARTS) for log in timed[-LAST_STEPS:]]
        return fmean(seconds) if seconds else None

    @property
    def state(self) -> str:
        """Return `waiting` before the first step, `live`, `ended`, or `silent` where nothing was
        logged for long."""
        if not self.steps:
            return "waiting"
        patience = max(SILENT_SECONDS, SILENT_STEPS * (self.seconds or 0.0))
        is_silent = time.time() - self.updated > patience
        return "ended" if self.has_ended else "silent" if is_silent else "live"


def read_log(run_dir: Path, known: Log) -> Log:
    """Return what a run has logged: what is known where its file has not changed."""
    path = run_dir / LOGS
    try:
        found = path.stat()
        version = found.st_mtime_ns, found.st_size
        if version == known.version:
            return known
        logs = read_logs(run_dir)
    except OSError:  # the run has logged nothing yet
        return Log()
    marks = ["train_runtime" in log for log in logs if "train_runtime" in log or "loss" in log]
    return Log(steps=by_step(logs), version=version, has_ended=bool(marks) and marks[-1])
