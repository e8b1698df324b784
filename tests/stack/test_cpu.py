"""Processes of CPU runs end without shared memory that they leave behind."""

import subprocess
import sys
from pathlib import Path

from tests.rig.processes import ROOT

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
    command = [sys.executable, "-c", TWO_RANKS, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
