"""The machine's memory, shared by pytest's workers: what starts processes waits for its share.

Without it, workers that are all at their largest run out of it, or are refused by preflight. First
come, first served; but who holds memory already (a server, whose training is to start) goes first,
for he gives nothing back before he is done.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock

COLOCATED_RANK = 3.5
REPLICA = 2.9
TRAINING_RANK = 1.2
"""GiB of one process with the tiny model (proportional set size), rounded up."""

FIRST_SHARE = 0.65
"""Of the machine's memory, up to which something new may start."""

WHOLE_SHARE = 0.78
"""Up to which those may start something more who hold some already. The rest is pytest's."""

PATIENCE = 900
"""Seconds, after which a process starts all the same and preflight decides."""

_LEDGER = Path(tempfile.gettempdir()) / "swift-grpo-ext-memory"


def needed(command: Sequence[str], env: Mapping[str, str]) -> float:
    """GiB that a `swift` command will take, with all the processes that it starts."""
    if "rollout" in command:
        return REPLICA * int(_option(command, "--vllm_data_parallel_size", "1"))
    has_engine = (
        _option(command, "--vllm_mode", "colocate") == "colocate"
        and _option(command, "--use_vllm", "true") == "true"
    )
    return (COLOCATED_RANK if has_engine else TRAINING_RANK) * int(env.get("NPROC_PER_NODE", "1"))


@contextmanager
def reserved(gib: float) -> Iterator[None]:
    """Hold `gib` of the machine's memory; waits for other tests to give back theirs."""
    _LEDGER.mkdir(exist_ok=True)
    entry = _LEDGER / f"{time.time_ns()}-{os.getpid()}-{uuid.uuid4().hex}"
    waiting = entry.with_suffix(".waiting")
    waiting.touch()
    deadline = time.monotonic() + PATIENCE
    try:
        while not _enter(entry, gib) and time.monotonic() < deadline:
            time.sleep(1)
        waiting.unlink()
        yield
    finally:
        waiting.unlink(missing_ok=True)
        entry.unlink(missing_ok=True)


def _enter(entry: Path, gib: float) -> bool:
    with FileLock(_LEDGER / "lock"):
        held = [e for e in _living("*-*") if not e.suffix]
        taken = sum(map(_gib, held))
        has_some = any(_pid(e) == os.getpid() for e in held)
        is_next = min(_living("*.waiting")).stem == entry.name
        if not (has_some or is_next):
            return False
        share = WHOLE_SHARE if has_some else FIRST_SHARE
        if taken and taken + gib > share * psutil.virtual_memory().total / 2**30:
            return False
        entry.write_text(str(gib), encoding="utf-8")
    return True


def _living(pattern: str) -> list[Path]:
    """Entries of workers that live; those of the others are removed."""
    entries = list(_LEDGER.glob(pattern))
    for entry in entries:
        if not psutil.pid_exists(_pid(entry)):
            entry.unlink(missing_ok=True)
    return [entry for entry in entries if psutil.pid_exists(_pid(entry))]


def _gib(entry: Path) -> float:
    try:
        return float(entry.read_text(encoding="utf-8"))
    except FileNotFoundError:  # given back in this moment
        return 0


def _pid(entry: Path) -> int:
    return int(entry.name.split("-")[1])


def _option(command: Sequence[str], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default
