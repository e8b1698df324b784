"""A process has what its machine, its container and the other ranks leave it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from swift_grpo_ext import memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 of its 128 GiB are free; returns where its `proc` and `sys` are."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    free = SimpleNamespace(available=64 * GIB, total=128 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def make_group(folder: Path, limit: object, used: int, cached: int, *, version: int = 2) -> None:
    """A control group, as the kernel shows it."""
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


def belongs(machine: Path, *lines: str) -> None:
    (machine / "proc/self").mkdir(parents=True)
    (machine / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_without_a_container(machine: Path) -> None:
    assert memory.free_bytes() == 64 * GIB
    belongs(machine, "0::/user.slice")
    make_group(machine / "sys/fs/cgroup/user.slice", "max", 5 * GIB, 0)
    assert (memory.free_bytes(), memory.total_bytes()) == (64 * GIB, 128 * GIB)


@pytest.mark.parametrize("path", ["/", "/../../pod/container", "/docker/1"])
def test_a_container_of_version_2_and_its_ranks(
    path: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees its own group as the top one. Cached files are given back before anybody dies."""
    belongs(machine, f"0::{path}")
    make_group(machine / "sys/fs/cgroup", 32 * GIB, 20 * GIB, 12 * GIB)
    assert (memory.free_bytes(), memory.total_bytes()) == (24 * GIB, 32 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory.free_bytes() == 3 * GIB
    make_group(machine / "sys/fs/cgroup", 8 * GIB, 9 * GIB, 0)
    assert memory.free_bytes() == 0


def test_a_container_in_a_container_of_version_1(machine: Path) -> None:
    belongs(machine, "9:cpu,cpuacct:/pod/job", "8:memory:/pod/job", "0::/")
    top = machine / "sys/fs/cgroup/memory"
    make_group(top, 2**63 - 4096, 40 * GIB, 0, version=1)
    make_group(top / "pod", 30 * GIB, 26 * GIB, GIB, version=1)
    make_group(top / "pod/job", 16 * GIB, 4 * GIB, 0, version=1)
    assert (memory.free_bytes(), memory.total_bytes()) == (5 * GIB, 16 * GIB)
