"""How much memory this process may take: of the machine, and of its container."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path("/")
"""`proc` and `sys` are in this folder."""


def total_bytes() -> int:
    """Return the memory of this machine, or of this process's control group where that has less.

    `psutil` reports the machine alone, and the kernel kills a process at its group's limit
    (https://docs.kernel.org/admin-guide/cgroup-v2.html).
    """
    groups = ROOT / "sys/fs/cgroup"
    limits = [groups / "memory/memory.limit_in_bytes"]  # version 1, of a container
    with suppress(OSError):  # no Linux
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="utf-8")
        own = groups / lines.rpartition("::")[2].strip().lstrip("/")  # version 2 is the last line
        # A group's parents bound it too. A container sees its own group as the top one.
        limits += [folder / "memory.max" for folder in (own, *own.parents)]
    found = [int(psutil.virtual_memory().total)]
    for limit in limits:
        with suppress(OSError, ValueError):  # no such group; "max", which is no limit
            found.append(int(limit.read_text(encoding="utf-8")))
    return min(found)
