"""Reads what a run has logged: its steps, their seconds, and whether it has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_grpo_ext.timing import PARTS
from swift_grpo_ext.tools.runs import LOGS, STEP, by_step, read_logs


@dataclass(frozen=True, kw_only=True)
class Log:
    """A run's `logging.jsonl` as it was read."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The logged values of each optimizer step, as `by_step` returns them."""

    version: tuple[int, int] = (0, 0)
    """The file's time in nanoseconds since 1970, and its size; 0 before it is there."""

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
    def updated(self) -> str:
        """When the file was written last, by this machine's clock; empty before it is there."""
        seconds = self.version[0] // 10**9
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""

    @property
    def seconds(self) -> dict[int, dict[str, float]]:
        """The seconds of each step and of its parts. The first step that was timed is left out
        where there are more: a run begins with what it does once."""
        timed = {step: log for step, log in self.steps.items() if "time/rollout" in log}
        return {
            step: {"step": sum(log[f"time/{part}"] for part in PARTS)}
            | {name.removeprefix("time/"): v for name, v in log.items() if name[:5] == "time/"}
            for step, log in [*timed.items()][len(timed) > 1 :]
        }


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
