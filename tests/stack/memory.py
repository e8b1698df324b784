"""The machine's memory, shared by pytest's workers: what starts processes waits for their share.

Without it, two workers that are both at their largest run out of it, or are refused by preflight.
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

COLOCATED_RANK = REPLICA = 3.3
TRAINING_RANK = 1.3
"""GiB of one process with the tiny model, as `ps` shows them, rounded up."""

SHARE = 0.85
"""Of the machine's memory, for all of them."""

PATIENCE = 900
"""Seconds, after which a process starts all the same and preflight decides."""

_LEDGER = Path(tempfile.gettempdir()) / "swift-grpo-ext-tests"


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
    entry = _LEDGER / f"{os.getpid()}-{uuid.uuid4().hex}"
    deadline = time.monotonic() + PATIENCE
    while not _enter(entry, gib) and time.monotonic() < deadline:
        time.sleep(1)
    try:
        yield
    finally:
        entry.unlink(missing_ok=True)


def _enter(entry: Path, gib: float) -> bool:
    with FileLock(_LEDGER / "lock"):
        taken = sum(map(_read, _LEDGER.glob("*-*")))
        if taken and taken + gib > SHARE * psutil.virtual_memory().total / 2**30:
            return False
        entry.write_text(str(gib), encoding="utf-8")
    return True


def _read(entry: Path) -> float:
    """What an entry holds; a worker that was killed holds nothing."""
    if not psutil.pid_exists(int(entry.name.partition("-")[0])):
        entry.unlink(missing_ok=True)
        return 0
    try:
        return float(entry.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0


def _option(command: Sequence[str], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default
