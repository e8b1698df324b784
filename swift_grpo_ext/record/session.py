"""Numbers the sessions of a run, and keeps a second training out of its folder.

A session is a start of the trainer. It takes its number by making `samples/.session-0000.lock`,
which a disk grants to one process alone, and locks it for as long as the process lives: of a
process that was killed, the kernel unlocks it. Where disks have no locks, two trainings in one
folder have numbers, and so files, of their own.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import Findings, error
from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.rewards import REWARDS
from swift_grpo_ext.record.row import SAMPLES

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments

LOCK_NAME = re.compile(r"\.session-(\d+)\.lock")

_held: dict[str, int] = {}
"""Descriptors by path. None is closed before the process ends: to close any of a file's descriptors
ends all locks that the process has on it (fcntl(2))."""


class RunInUseError(RuntimeError):
    """Another training writes its record to the folder."""


def claim_session(run_dir: str | os.PathLike[str]) -> int:
    """Return the number of the session that starts now: one more than the greatest, from 0.

    One rank calls it, before any rank has written, and tells the others. Other processes are
    refused until this one ends. A folder that cannot be written is claimed by nobody.

    Raises:
        RunInUseError: a process that lives has claimed the folder.
        OSError: the folder cannot be read.
    """
    folder = SAMPLES.folder(run_dir)
    number = next_session(run_dir)
    with suppress(OSError):  # the log warns of what it cannot write
        folder.mkdir(parents=True, exist_ok=True)
        while not _make(lock := folder / f".session-{number:04d}.lock"):
            number += 1
        if reason := reason_against(run_dir):
            lock.unlink()
            raise RunInUseError(f"--output_dir {os.fspath(run_dir)}: {reason}")
        for table in (SAMPLES, REWARDS):
            for unfinished in table.folder(run_dir).glob(".session-*.tmp"):
                unfinished.unlink()  # of a process that was killed
    return number


def check_output_dir(args: RLHFArguments) -> Findings:
    """Refuse a folder that another training writes its record to; the first rank looks."""
    if args.sample_log != "none" and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the record warns of a folder that cannot be read
            if reason := reason_against(args.output_dir):
                yield error(f"output_dir {args.output_dir}", reason)


def next_session(run_dir: str | os.PathLike[str]) -> int:
    """Return one more than the greatest number of a session that left files, from 0."""
    tables = [table.folder(run_dir) for table in (SAMPLES, REWARDS)]
    numbers = [file.session for folder in tables for file in record_files(folder)]
    return max([*numbers, *_locks(run_dir)], default=-1) + 1


def reason_against(run_dir: str | os.PathLike[str]) -> str:
    """Say which other training writes its record to the folder, and what to do; "" for none."""
    for lock in _locks(run_dir).values():
        if str(lock) not in _held:
            with suppress(OSError), lock.open("r+") as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    return (
                        f"{file.read() or 'another process'} trains into it. Expected a folder of "
                        "its own for each training, or one would replace what the other writes. "
                        "End that process, or give this training another --output_dir. If that "
                        f"machine is gone and the disk does not know it, remove {lock}."
                    )
    return ""


def _locks(run_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the files by which sessions were claimed, by number."""
    found = SAMPLES.folder(run_dir).resolve().glob(".session-*.lock")
    named = ((LOCK_NAME.fullmatch(path.name), path) for path in found)
    return {int(match[1]): path for match, path in named if match}


def _make(lock: Path) -> bool:
    """Make and lock a file; false where it is there already."""
    try:
        descriptor = os.open(lock.resolve(), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    _held[str(lock.resolve())] = descriptor
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = f"process {os.getpid()} on {socket.gethostname()} (since {now})"
    with suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, owner.encode())
    return True
