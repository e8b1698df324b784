"""Processes of CPU runs end without shared memory or threads that they leave behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rig.processes import ROOT


def run_python(code: str, *argv: str) -> None:
    """Run code in a process of its own."""
    command = [sys.executable, "-c", code, *argv]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]


TWO_RANKS = """
import os
import pathlib
from types import SimpleNamespace
import torch
import torch.distributed as dist
from swift_grpo_ext.cpu import engines
from swift_grpo_ext.upstream.patches import make
from tests.rig.ranks import start_processes

def run(rank, folder):
    import vllm._C
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make(engines.name_shared_memory_by_run)
    os.environ["VLLM_DIST_IDENT"] = "//"  # vLLM's value for `env://`
    group = SimpleNamespace(
        unique_name="tp:0", ranks=[0, 1], rank=rank, world_size=2, device_group=dist.group.WORLD
    )
    os.environ["MASTER_PORT"] = "of another run"
    other = _CPUSHMDistributed.make_group_name(group)
    os.environ["MASTER_PORT"] = f"of {folder}".replace("/", "-")
    name = _CPUSHMDistributed.make_group_name(group)
    assert name != other
    memory = pathlib.Path("/dev/shm", f"{name}_{rank}".lstrip("/"))
    memory.touch()  # as left by another run
    values = torch.full([8], rank + 1.0)
    _CPUSHMDistributed(group).all_reduce(values)
    assert values.tolist() == [3.0] * 8
    assert not memory.exists()

start_processes(run)
"""


def test_shared_memory_neither_meets_nor_leaves_any_of_its_name(tmp_path: Path) -> None:
    """Two ranks of colocated tensor parallelism are joined by vLLM's shared memory. Processes end
    by `os._exit` or a signal, without a cleanup. Each run has names of its own."""
    run_python(TWO_RANKS, str(tmp_path))


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

def gloo_threads():
    names = []
    for file in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(file.read_text())
    return sum("gloo" in name for name in names)

def start():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    trainer = SimpleNamespace(model=model)
    trainer.itself = trainer
    return store

weights = GlooCommunicator(SimpleNamespace(rank=0, world_size=1, store=start()))
weights.broadcast(torch.zeros(2), src=0)
assert gloo_threads()
del weights
_leave_group()

gc.freeze()  # what is left to collect is ours
for _ in range(100):
    start()
    sent, received = torch.zeros(2), torch.zeros(2)
    sent.mark = received.mark = "known to Python"
    dist.all_gather([received], sent)
    del sent, received
    _leave_group()
deadline = time.monotonic() + 60
while gloo_threads():  # a joined thread is in /proc until the kernel has removed it
    assert time.monotonic() < deadline
"""


def test_no_thread_of_gloo_outlives_its_groups() -> None:
    """The trainer is unreachable, as at the end of a rank, in a cycle that holds DDP's group. A
    thread that has yet to free a tensor needs the GIL; this causes no deadlock."""
    run_python(LONE_RANK)
