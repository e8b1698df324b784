"""What two runs have logged of their updates, and the weights that they saved, side by side."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGGED = ("learning_rate", "loss", "grad_norm", "kl")
"""Values of `logging.jsonl` in the order in which one decides the next. Times, memory and what a
process has in its caches are a run's own."""

LOGS = "logging.jsonl"
"""ms-swift's own file of a run's metrics."""

STEP = "global_step/max_steps"


@dataclass(frozen=True, kw_only=True)
class UpdateDifference:
    """The first value of an update that differs."""

    step: int
    """The optimizer step, from 1."""

    what: str
    """One of `LOGGED`, or `weights` of the checkpoint after that step."""

    values: tuple[Any, Any]
    """The value in each run; of weights, the file that differs."""

    def __str__(self) -> str:
        one, other = ("not logged" if value is None else value for value in self.values)
        if self.what != "weights":
            return f"step {self.step}: {self.what} is {one} in A and {other} in B"
        place = f"step {self.step}: the weights differ, checkpoint-{self.step}"
        return f"{place}/{one}" if one == other else f"{place} has {one} in A and {other} in B"


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The result."""

    num_steps: int = 0
    """The number of steps in both logs before the first difference."""

    names: tuple[str, ...] = ()
    """Those of `LOGGED` that were there."""

    checkpoint: str | None = None
    """The last one that both runs have, where its weights are equal; they are looked at where
    nothing else of the updates differs."""

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
    both = {path.name for path in run_a.glob("checkpoint-*")}
    both &= {path.name for path in run_b.glob("checkpoint-*")}
    last = max((name for name in both if _step_of(name)), key=_step_of, default=None)
    if last is None:
        return None, None
    folders = run_a / last, run_b / last
    files = sorted({path.name for folder in folders for path in folder.glob("*.safetensors")})
    for file in files:
        one, other = (folder / file for folder in folders)
        is_there = one.is_file(), other.is_file()
        if not all(is_there) or not filecmp.cmp(one, other, shallow=False):
            one_has, other_has = (file if there else f"no {file}" for there in is_there)
            values = one_has, other_has
            found = UpdateDifference(step=_step_of(last), what="weights", values=values)
            return None, found
    return (last if files else None), None


def _step_of(checkpoint: str) -> int:
    """Return 0 for a folder of another kind."""
    number = checkpoint.partition("-")[2]
    return int(number) if number.isdecimal() else 0


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
    """Return the logs of optimizer steps by the steps' numbers, in order; a resume takes back the
    steps from which on it makes them once more."""
    steps: dict[int, dict[str, Any]] = {}
    for logged in logs:
        if "loss" in logged:
            step = int(str(logged[STEP]).partition("/")[0])
            while steps and next(reversed(steps)) >= step:
                steps.popitem()
            steps[step] = logged
    return steps
