"""How much memory there is for this process: of the machine, and of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path("/")
"""`proc` and `sys` are in this folder."""

NAMES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""A controller in `/proc/self/cgroup` (none in version 2) has these files with the limit and with
what is used, and this entry of `memory.stat` with what the kernel would give back first."""


def total_bytes() -> int:
    """Return the memory of this machine, or of this process's container where that has less."""
    found = [int(psutil.virtual_memory().total)]
    for folder, (limit, _, _) in _control_groups():
        with suppress(OSError, ValueError):  # no such group; "max", which is no limit
            found.append(int((folder / limit).read_text(encoding="utf-8")))
    return min(found)


def free_bytes() -> int:
    """Return this rank's share of the memory that is free, in bytes: ranks of one machine
    (`LOCAL_WORLD_SIZE`) share it.

    `psutil`, as `free`, tells of the machine alone. A container's process is killed at the
    container's limit (https://docs.kernel.org/admin-guide/cgroup-v2.html), and so is one whose
    container lies in a limited one.
    """
    found = [int(psutil.virtual_memory().available)]
    for folder, (limit, used, given_back) in _control_groups():
        with suppress(OSError, ValueError):
            most, now = ((folder / name).read_text(encoding="utf-8") for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # What is used counts cached files too, such as a data set's: they make room when asked.
            found.append(int(most) - int(now) + int(stat.get(given_back, 0)))
    return max(min(found), 0) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folder of each control group that this process may be in, and its `NAMES`."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & NAMES.keys():
            top = ROOT / "sys/fs/cgroup" / controller
            # Where a container sees its own group as the top one, the path may lead nowhere.
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):  # a group's parents bound it too
                yield folder, NAMES[controller]
                if folder == top:
                    break
