"""Finds runs in the folders that a user names.

Unless `--add_version false` is set, ms-swift makes a folder such as `v0-20261127-093000` in
`--output_dir` for each training, and trains into it. Both folders name the run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

MARKS = ("args.json", "logging.jsonl", "samples/*session-*")
"""Files of a training; it writes `args.json` first, before the model is loaded."""

VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")
MAX_NAMES = 12  # in a message


def find_run(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the one run that `path` names; raises the errors of `find_runs`, and
    ValueError where there are several."""
    runs = find_runs(path)
    if len(runs) > 1:
        raise ValueError(
            f"{path} holds {len(runs)} runs, expected one: give one of {_list([*map(str, runs)])}."
        )
    return runs[0]


def find_runs(path: str | os.PathLike[str]) -> list[Path]:
    """Return the folder itself if it is a run; else its newest version, which a line on standard
    error names; else the run, or the newest version, of each folder in it.

    Raises:
        FileNotFoundError: there is no run.
    """
    folder = Path(path)
    if run := _run_or_newest_version(folder):
        return [run]
    inner = sorted(entry for entry in folder.glob("*") if entry.is_dir())
    runs = [run for run in map(_run_or_newest_version, inner) if run]
    if not runs:
        near = folder if folder.is_dir() else folder.parent
        content = _list(sorted(entry.name for entry in near.glob("[!.]*"))) or "nothing"
        raise FileNotFoundError(
            f"{path} holds no run (args.json, logging.jsonl or samples); {near} has {content}. "
            "Give the --output_dir of a training."
        )
    return runs


def run_name(run: Path) -> str:
    """Return the name of a run's folder, with `--output_dir` before that of a version."""
    run = run.resolve()
    return f"{run.parent.name}/{run.name}" if VERSION.fullmatch(run.name) else run.name


def _run_or_newest_version(folder: Path) -> Path | None:
    if _is_run(folder):
        return folder
    versions = [path for path in folder.glob("v*-*") if VERSION.fullmatch(path.name)]
    runs = sorted(filter(_is_run, versions), key=lambda path: int(path.name[1:].partition("-")[0]))
    if not runs:
        return None
    print(f"{folder}: its newest run, {runs[-1].name}, is taken.", file=sys.stderr)
    return runs[-1]


def _is_run(folder: Path) -> bool:
    # A checkpoint has an args.json, too.
    is_checkpoint = folder.name.startswith("checkpoint-")
    return not is_checkpoint and any(next(folder.glob(mark), None) for mark in MARKS)


def _list(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
