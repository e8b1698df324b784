"""The updates that two runs have logged, and the weights that they saved, side by side."""

from __future__ import annotations

import filecmp
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGGED = ("learning_rate", "loss", "grad_norm", "kl")
"""Values of `logging.jsonl` in the order in which one decides the next. Times, memory and what a
process has in its caches are a run's own."""

LOGS = "logging.jsonl"  # ms-swift's own file of a run's metrics
STEP = "global_step/max_steps"


@dataclass(frozen=True, kw_only=True)
class UpdateDifference:
    """The first value of an update that differs."""

    step: int  # the optimizer step, from 1
    what: str  # one of `LOGGED`, or `weights` of the checkpoint after that step
    values: tuple[Any, Any]  # in each run; of weights, the file that differs

    def __str__(self) -> str:
        one, other = ("not logged" if value is None else value for value in self.values)
        if self.what == "weights":
            return f"step {self.step}: the weights differ, checkpoint-{self.step}/{one}"
        return f"step {self.step}: {self.what} is {one} in A and {other} in B"


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The result."""

    num_steps: int = 0  # in both logs before the first difference
    names: tuple[str, ...] = ()  # those of `LOGGED` that were there

    checkpoint: str | None = None
    """The last one that both runs have, where its weights are equal; compared where the logs do
    not differ."""

    difference: UpdateDifference | None = None


def compare_updates(run_a: str | os.PathLike[str], run_b: str | os.PathLike[str]) -> Updates:
    """Compare the updates of two runs, up to the first difference."""
    logs = read_steps(run_a), read_steps(run_b)
    common = sorted(logs[0].keys() & logs[1].keys())
    names = tuple(n for n in LOGGED if any(n in log[step] for log in logs for step in common))
    for number, step in enumerate(common):
        for name in names:
            values = logs[0][step].get(name), logs[1][step].get(name)
            if repr(values[0]) != repr(values[1]):  # NaN is NaN
                found = UpdateDifference(step=step, what=name, values=values)
                return Updates(num_steps=number, names=names, difference=found)
    checkpoint, difference = _compare_last_weights(Path(run_a), Path(run_b))
    return Updates(num_steps=len(common), names=names, checkpoint=checkpoint, difference=difference)


def _compare_last_weights(run_a: Path, run_b: Path) -> tuple[str | None, UpdateDifference | None]:
    """Return the last checkpoint that both runs have, where its weights are equal, and the first
    of its files that differs; None twice where there is none of weights."""
    names = ({path.name for path in run.glob("checkpoint-*")} for run in (run_a, run_b))
    found = (re.fullmatch(r"checkpoint-(\d+)", name) for name in set.intersection(*names))
    steps = [int(match[1]) for match in found if match]
    if not steps:
        return None, None
    name = f"checkpoint-{max(steps)}"
    files = {file.name for run in (run_a, run_b) for file in (run / name).glob("*.safetensors")}
    _, differing, missing = filecmp.cmpfiles(run_a / name, run_b / name, files, shallow=False)
    if apart := sorted([*differing, *missing]):
        values = apart[0], apart[0]
        return None, UpdateDifference(step=max(steps), what="weights", values=values)
    return (name if files else None), None


def read_steps(run: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Return a run's log as `by_step` has it; it is empty before the run has logged anything."""
    try:
        return by_step(read_logs(run))
    except OSError:
        return {}


def read_logs(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's log; raises OSError where it cannot be read."""
    logs = []
    for line in Path(run, LOGS).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # cut short, as its process was
            logs.append(json.loads(line))
    return logs


def by_step(logs: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the logs of optimizer steps by the steps' numbers, in order. A resumed run logs some
    steps again: its own logs replace the earlier ones of the same and later steps."""
    steps: dict[int, dict[str, Any]] = {}
    for logged in logs:
        if "loss" in logged:
            step = int(str(logged[STEP]).partition("/")[0])
            while steps and next(reversed(steps)) >= step:
                steps.popitem()
            steps[step] = logged
    return steps
