"""A process may take what its machine and its container have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from swift_grpo_ext.server import memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It has 128 GiB; returns where its `proc` and `sys` are."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    total = SimpleNamespace(total=128 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: total)
    return tmp_path


def limit(folder: Path, value: object, name: str = "memory.max") -> None:
    """A control group, as the kernel shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{value}\n")


def belongs(machine: Path, *lines: str) -> None:
    (machine / "proc/self").mkdir(parents=True)
    (machine / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_without_a_container(machine: Path) -> None:
    assert memory.total_bytes() == 128 * GIB
    belongs(machine, "0::/user.slice")
    limit(machine / "sys/fs/cgroup/user.slice", "max")
    assert memory.total_bytes() == 128 * GIB


@pytest.mark.parametrize("path", ["/", "/../../pod/container", "/docker/1"])
def test_a_container_of_version_2(path: str, machine: Path) -> None:
    """It sees its own group as the top one."""
    belongs(machine, f"0::{path}")
    limit(machine / "sys/fs/cgroup", 32 * GIB)
    assert memory.total_bytes() == 32 * GIB


def test_a_container_of_version_1(machine: Path) -> None:
    belongs(machine, "9:cpu,cpuacct:/pod/job", "8:memory:/pod/job", "0::/")
    limit(machine / "sys/fs/cgroup/memory", 16 * GIB, "memory.limit_in_bytes")
    assert memory.total_bytes() == 16 * GIB


def test_a_job_in_a_slice(machine: Path) -> None:
    """As Slurm makes them: a parent's limit counts too."""
    belongs(machine, "0::/slurm/job/step")
    top = machine / "sys/fs/cgroup/slurm"
    for folder, value in ((top, "max"), (top / "job", 16 * GIB), (top / "job/step", 30 * GIB)):
        limit(folder, value)
    assert memory.total_bytes() == 16 * GIB
