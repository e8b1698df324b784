"""Shares the machine's memory among pytest's workers: a test waits before it starts processes.

Without it workers would run out of memory at their peaks, or preflight would refuse their runs.
Each GiB is a lock on a file, which the system releases when a worker dies. Tests wait in a queue.
A test that holds memory already (for a server, before its training starts) skips the queue and may
take more: it could not release anything while it waits.
"""

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
"""GiB of one process with the tiny model: its proportional set size, rounded up."""

FIRST_SHARE = 0.65
"""Share of the machine's memory for a test that holds none yet."""

WHOLE_SHARE = 0.78
"""Share of the machine's memory for a test that holds some. The rest is for pytest itself."""

PATIENCE, PATIENCE_OF_HOLDERS = 900, 20
"""Seconds after which a process starts in any case; preflight then decides. Tests with servers may
all wait for the memory of the others, as three of them did."""

_FOLDER = Path(tempfile.gettempdir()) / "swift-grpo-ext-memory"
_held: list[FileLock] = []
"""The locks of this worker."""


def needed(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Return the GiB of a `swift` command with all processes that it starts."""

    def option(name: str, default: str) -> str:
        return command[command.index(name) + 1] if name in command else default

    if "rollout" in command:
        return REPLICA * int(option("--vllm_data_parallel_size", "1"))
    is_colocated = option("--vllm_mode", "colocate") == "colocate"
    has_engine = is_colocated and option("--use_vllm", "true") == "true"
    return (COLOCATED_RANK if has_engine else TRAINING_RANK) * int(env.get("NPROC_PER_NODE", "1"))


@contextmanager
def reserved(gib: float) -> Iterator[None]:
    """Hold `gib` of the machine's memory; wait until other tests release enough."""
    _FOLDER.mkdir(exist_ok=True)
    total = psutil.virtual_memory().total / 2**30
    share = int(total * (WHOLE_SHARE if _held else FIRST_SHARE))
    count = max(0, min(round(gib), share - len(_held)))
    deadline = time.monotonic() + (PATIENCE_OF_HOLDERS if _held else PATIENCE)
    with ExitStack() as queue:
        if not _held:
            queue.enter_context(FileLock(_FOLDER / "queue"))
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
