"""Processes of CPU runs end without shared memory or threads that they leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.processes import ROOT


def test_shared_memory_neither_meets_nor_leaves_any_of_its_name(tmp_path: Path) -> None:
    """Training processes end by `os._exit` or a signal, without a cleanup."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.rig.cpu.shared_memory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


LONE_RANK = """
import contextlib
import gc
import pathlib
import time
import torch
import torch.distributed as dist
from swift.rlhf_trainers import vllm_client  # as a rank has: DDP would import torch._dynamo here
from swift_grpo_ext.cpu.gloo import GlooCommunicator
from swift_grpo_ext.cpu.settings import _leave_group
from types import SimpleNamespace

def gloo_threads(fewer_than=1000):
    # A joined thread is in /proc until the kernel has removed it.
    deadline = time.monotonic() + 60
    while True:
        names = []
        for file in pathlib.Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):
                names.append(file.read_text())
        count = sum("gloo" in name for name in names)
        if count < fewer_than or time.monotonic() > deadline:
            return count

def start():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    trainer = SimpleNamespace(model=model)
    trainer.itself = trainer
    return store

weights = GlooCommunicator(SimpleNamespace(rank=0, world_size=1, store=start()))
weights.broadcast(torch.zeros(2), src=0)
both = gloo_threads()
del weights
own = gloo_threads(fewer_than=both)
_leave_group()
print(both, own, gloo_threads(fewer_than=1))

gc.freeze()  # what is left to collect is ours
for _ in range(100):
    start()
    sent, received = torch.zeros(2), torch.zeros(2)
    sent.mark = received.mark = "known to Python"
    dist.all_gather([received], sent)
    del sent, received
    _leave_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are named in /proc")
def test_no_thread_of_gloo_outlives_its_groups() -> None:
    """The trainer is unreachable, as at the end of a rank, in a cycle that holds DDP's group. A
    thread that has yet to free a tensor needs the GIL; this causes no deadlock."""
    lone = subprocess.run(
        [sys.executable, "-c", LONE_RANK], check=True, capture_output=True, text=True, timeout=300
    )
    both, own, none = map(int, lone.stdout.split())
    assert both > own > none == 0
