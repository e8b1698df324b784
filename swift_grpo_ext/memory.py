"""How much memory this process may take: of the machine, and of its container."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path("/")
"""`proc` and `sys` are in this folder."""

LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""A controller in `/proc/self/cgroup` (none in version 2), and its file with the limit."""


def total_bytes() -> int:
    """Return the memory of this machine, or of this process's container where that has less.

    `psutil` reports the machine alone. A container's process is killed at the container's limit
    (https://docs.kernel.org/admin-guide/cgroup-v2.html), and so is one inside a limited one.
    """
    found = [int(psutil.virtual_memory().total)]
    for limit in _limits():
        with suppress(OSError, ValueError):  # no such group; "max", which is no limit
            found.append(int(limit.read_text(encoding="utf-8")))
    return min(found)


def _limits() -> Iterator[Path]:
    """Yield the file with the limit of each control group that this process may be in."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & LIMITS.keys():
            top = ROOT / "sys/fs/cgroup" / controller
            # Where a container sees its own group as the top one, the path may lead nowhere.
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):  # a group's parents bound it too
                yield folder / LIMITS[controller]
                if folder == top:
                    break
