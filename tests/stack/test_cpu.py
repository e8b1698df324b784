"""Processes of CPU runs end without shared memory that they leave behind.

    python -m tests.stack.test_cpu FOLDER

joins two ranks of tensor parallelism by vLLM's shared memory.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from swift_grpo_ext.cpu import engines
from swift_grpo_ext.upstream.patches import make
from tests.rig.processes import run_module
from tests.rig.ranks import start_processes


def run(rank: int, folder: str) -> None:
    import vllm._C  # noqa: F401, registers the operators
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make(engines.name_shared_memory_by_run)
    os.environ["VLLM_DIST_IDENT"] = "//"  # vLLM's value for `env://`
    places = {"ranks": [0, 1], "rank": rank, "world_size": 2, "device_group": dist.group.WORLD}
    group: Any = SimpleNamespace(unique_name="tp:0", **places)
    os.environ["MASTER_PORT"] = "of another run"
    other = _CPUSHMDistributed.make_group_name(group)
    os.environ["MASTER_PORT"] = f"of {folder}".replace("/", "-")
    name = _CPUSHMDistributed.make_group_name(group)
    assert name != other
    memory = Path("/dev/shm", f"{name}_{rank}".lstrip("/"))
    memory.touch()  # as left by another run
    values = torch.full([8], rank + 1.0)
    _CPUSHMDistributed(group).all_reduce(values)
    assert values.tolist() == [3.0] * 8
    assert not memory.exists()


def test_shared_memory_neither_meets_nor_leaves_any_of_its_name(tmp_path: Path) -> None:
    """Processes end by `os._exit` or a signal, without a cleanup. Each run has names of its own."""
    run_module(__name__, str(tmp_path), log=tmp_path / "log")


if __name__ == "__main__":
    start_processes(run)
