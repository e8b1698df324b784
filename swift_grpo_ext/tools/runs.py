"""Finds runs in the folders that a user names, and reads their logs.

Unless `--add_version false` is set, ms-swift makes a folder such as `v0-20261127-093000` in
`--output_dir` for each training, and trains into it. Both folders name the run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

LOGS = "logging.jsonl"  # ms-swift's own file of a run's metrics
STEP = "global_step/max_steps"

# A training's folder has one of these files. `args.json` comes first, before the model is loaded.
MARKS = ("args.json", LOGS, "samples/*session-*")

VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")
MAX_SHOWN = 400  # characters of names in a message


def find_run(path: str | Path) -> Path:
    """Return the folder of the one run that `path` names; raises the errors of `find_runs`, and
    ValueError if there are several."""
    runs = find_runs(path)
    if len(runs) > 1:
        names = shorten(", ".join(map(str, runs)), MAX_SHOWN, placeholder=" ...")
        raise ValueError(f"{path} holds {len(runs)} runs, expected one: give one of {names}.")
    return runs[0]


def find_runs(path: str | Path) -> list[Path]:
    """Return the folder itself if it is a run; else its newest version, which a line on standard
    error names; else the run, or the newest version, of each folder in it. Raises FileNotFoundError
    if there is no run."""
    folder = Path(path)
    if run := _run_or_newest_version(folder):
        return [run]
    inner = sorted(entry for entry in folder.glob("*") if entry.is_dir())
    runs = [run for run in map(_run_or_newest_version, inner) if run]
    if not runs:
        near = folder if folder.is_dir() else folder.parent
        names = ", ".join(sorted(entry.name for entry in near.glob("[!.]*"))) or "nothing"
        content = shorten(names, MAX_SHOWN, placeholder=" ...")
        raise FileNotFoundError(
            f"{path} holds no run (args.json, logging.jsonl or samples); {near} has {content}. "
            "Give the --output_dir of a training."
        )
    return runs


def run_name(run: Path) -> str:
    """Return the name of a run's folder; before the name of a version comes `--output_dir`."""
    run = run.resolve()
    return f"{run.parent.name}/{run.name}" if VERSION.fullmatch(run.name) else run.name


def _run_or_newest_version(folder: Path) -> Path | None:
    if _is_run(folder):
        return folder
    found = ((VERSION.fullmatch(path.name), path) for path in folder.glob("v*-*") if _is_run(path))
    versions = {int(match[1]): path for match, path in found if match}
    if not versions:
        return None
    newest = versions[max(versions)]
    print(f"{folder}: using its newest run, {newest.name}.", file=sys.stderr)
    return newest


def _is_run(folder: Path) -> bool:
    # A checkpoint has an args.json, but is no run.
    is_checkpoint = folder.name.startswith("checkpoint-")
    return not is_checkpoint and any(next(folder.glob(mark), None) for mark in MARKS)


def read_logs(run: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log; [] before the run has logged anything."""
    path = Path(run, LOGS)
    logs = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # a line that was cut short with its process
            logs.append(json.loads(line))
    return logs


def by_step(logs: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the logs of optimizer steps by the steps' numbers, in order."""
    steps: dict[int, dict[str, Any]] = {}
    for logged in logs:
        if "loss" in logged:
            step = int(str(logged[STEP]).partition("/")[0])
            # A resumed run logs steps again: its logs replace those of the same and later steps.
            while steps and next(reversed(steps)) >= step:
                steps.popitem()
            steps[step] = logged
    return steps
