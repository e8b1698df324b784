"""What a run has logged: its steps, how fast they are, and whether it goes on."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from swift_grpo_ext.timing import PARTS
from swift_grpo_ext.tools.updates import LOGS, STEP, read_steps

LAST_STEPS = 20
"""Steps at the end of a run over which its reward and its seconds are averaged."""

SILENT_SECONDS, SILENT_STEPS = 300.0, 10
"""A run that logs nothing for so long, and for so many of its steps, may have stopped."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A run's `logging.jsonl` as it was read."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """As `read_steps` returns them."""

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
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:  # of a run that has logged nothing yet
        return Log()
    has_ended = False
    for line in reversed(lines):
        try:
            logged = json.loads(line)
        except ValueError:  # it is being written
            continue
        has_ended = "train_runtime" in logged
        if has_ended or "loss" in logged:
            break
    return Log(steps=read_steps(run_dir), version=version, has_ended=has_ended)
