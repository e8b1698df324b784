"""The machine's memory, shared by pytest's workers: what starts processes waits for its share.

Without it, workers that are all at their largest run out of memory, or preflight refuses them.
Each GiB that tests may take is a lock on a file, which a worker that dies gives back. First come,
first served; but who holds memory already (a server, whose training is to start) does not wait in
the row, and may take more, for he gives nothing back before he is done.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

COLOCATED_RANK = 3.5
REPLICA = 2.9
TRAINING_RANK = 1.2
"""GiB of one process with the tiny model (proportional set size), rounded up."""

FIRST_SHARE = 0.65
"""Something new may start up to this share of the machine's memory."""

WHOLE_SHARE = 0.78
"""Those who hold some already may start something more up to this share. The rest is pytest's."""

PATIENCE = 900
"""Seconds, after which a process starts all the same and preflight decides."""

_FOLDER = Path(tempfile.gettempdir()) / "swift-grpo-ext-memory"
_held: list[FileLock] = []
"""This worker holds these."""


def needed(command: Sequence[str], env: Mapping[str, str]) -> float:
    """GiB that a `swift` command will take, with all the processes that it starts."""

    def option(name: str, default: str) -> str:
        return command[command.index(name) + 1] if name in command else default

    if "rollout" in command:
        return REPLICA * int(option("--vllm_data_parallel_size", "1"))
    is_colocated = option("--vllm_mode", "colocate") == "colocate"
    has_engine = is_colocated and option("--use_vllm", "true") == "true"
    return (COLOCATED_RANK if has_engine else TRAINING_RANK) * int(env.get("NPROC_PER_NODE", "1"))


@contextmanager
def reserved(gib: float) -> Iterator[None]:
    """Hold `gib` of the machine's memory; waits for other tests to give back theirs."""
    _FOLDER.mkdir(exist_ok=True)
    total = psutil.virtual_memory().total / 2**30
    share = int(total * (WHOLE_SHARE if _held else FIRST_SHARE))
    count = max(0, min(round(gib), share - len(_held)))
    deadline = time.monotonic() + PATIENCE
    with ExitStack() as row:
        if not _held:
            row.enter_context(FileLock(_FOLDER / "row"))
        while True:
            taken: list[FileLock] = []
            for number in range(share):
                if len(taken) == count:
                    break
                lock = FileLock(_FOLDER / str(number))
                with suppress(Timeout):
                    lock.acquire(timeout=0)
                    taken.append(lock)
            if len(taken) == count or time.monotonic() > deadline:
                break
            for lock in taken:
                lock.release()
            time.sleep(1)
    _held.extend(taken)
    try:
        yield
    finally:
        for lock in taken:
            lock.release()
            _held.remove(lock)
