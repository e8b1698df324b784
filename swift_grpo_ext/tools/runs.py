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
"""What a training writes to its folder; `args.json` comes first, before the model is loaded."""

VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")

MAX_NAMES = 12
"""Names that a message lists."""


def find_run(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the one run that `path` names.

    Raises:
        FileNotFoundError: there is none; the message says what is there.
        ValueError: there are several; the message lists them.
    """
    runs = find_runs(path)
    if len(runs) > 1:
        raise ValueError(
            f"{path} holds {len(runs)} runs, expected one: give one of {_list([*map(str, runs)])}."
        )
    return runs[0]


def find_runs(path: str | os.PathLike[str]) -> list[Path]:
    """Return the folder itself where it is a run; else its newest version; else the run, or the
    newest version, of each folder in it. A line on standard error says which version is taken.

    Raises:
        FileNotFoundError: there is no run; the message says what is there.
    """
    folder = Path(path)
    if run := _run_or_newest_version(folder):
        return [run]
    if not folder.is_dir():
        near = f" ({folder.parent} has {_content(folder.parent)})" if not folder.exists() else ""
        raise FileNotFoundError(
            f"{path} is no folder{near}: expected the --output_dir of a training."
        )
    inner = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    runs = [run for run in map(_run_or_newest_version, inner) if run]
    if not runs:
        raise FileNotFoundError(
            f"{path} holds no run: neither it nor a folder in it has args.json, logging.jsonl "
            f"or samples. It has {_content(folder)}. Give the --output_dir of a training."
        )
    return runs


def run_name(run: Path) -> str:
    """Return how a run's folder is called, with `--output_dir` before the name of a version."""
    run = run.resolve()
    return f"{run.parent.name}/{run.name}" if VERSION.fullmatch(run.name) else run.name


def _run_or_newest_version(folder: Path) -> Path | None:
    if _is_run(folder):
        return folder
    versions = [path for path in folder.glob("v*-*") if VERSION.fullmatch(path.name)]
    runs = sorted(filter(_is_run, versions), key=lambda path: int(path.name[1:].partition("-")[0]))
    if not runs:
        return None
    *others, newest = runs
    also = f" (also there: {_list([path.name for path in others[::-1]])})" if others else ""
    print(f"{folder}: its newest run, {newest.name}, is taken{also}.", file=sys.stderr)
    return newest


def _is_run(folder: Path) -> bool:
    # A checkpoint has an args.json, too.
    is_checkpoint = folder.name.startswith("checkpoint-")
    return not is_checkpoint and any(next(folder.glob(mark), None) for mark in MARKS)


def _content(folder: Path) -> str:
    return _list(sorted(path.name for path in folder.glob("[!.]*"))) or "nothing"


def _list(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
