"""Two ranks of colocated tensor parallelism on CPU (gloo), joined by vLLM's shared memory.

python -m tests.rig.cpu.shared_memory FOLDER
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from swift_grpo_ext.cpu import engines
from swift_grpo_ext.upstream.patches import make
from tests.rig.ranks import start_processes


def run(rank: int, folder: str) -> None:
    import vllm._C  # noqa: F401
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make(engines.name_shared_memory_by_run)
    os.environ.update(VLLM_DIST_IDENT="//", MASTER_PORT=f"of {folder}".replace("/", "-"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    group: Any = SimpleNamespace(
        **{"unique_name": "tp:0", "ranks": [0, 1], "rank": rank, "world_size": 2},
        device_group=dist.group.WORLD,
    )
    name = f"{_CPUSHMDistributed.make_group_name(group)}_{rank}"
    memory = Path("/dev/shm", name.lstrip("/"))
    memory.touch()  # as left by another run
    values = torch.full([8], rank + 1.0)
    _CPUSHMDistributed(group).all_reduce(values)
    assert values.tolist() == [3.0] * 8
    assert not memory.exists()


if __name__ == "__main__":
    start_processes(run)
