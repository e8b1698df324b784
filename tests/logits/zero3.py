"""Two ranks of DeepSpeed's ZeRO-3 on CPU (gloo), against unsharded copies of the same model.

    python -m tests.logits.zero3 FOLDER

Writes `FOLDER/rankR.pt`: for each of `CASES`, what `sharded.compare` returns.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tests.logits import sharded
from tests.logits.sharded import Case, Trained
from tests.logits.two_ranks import WAIT
from tests.ranks import start_two_processes

CASES = [
    *(Case("untied", counts) for counts in sharded.COUNTS),
    Case("untied", (7, 2), chunk_size=0),
    Case("tied", (0, 7)),
    Case("LoRA", (7, 0)),
    Case("capped", (2, 7)),
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    # 0: small weights travel too, as large ones do.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def run(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
    torch.set_num_threads(1)
    results = {tuple(case): sharded.compare(rank, case, zero3) for case in CASES}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def zero3(model: Any, case: Case) -> Trained:
    import deepspeed.comm.torch
    from deepspeed.utils import safe_get_full_grad

    # The shared-memory operator would be compiled; gloo serves.
    deepspeed.comm.torch.build_shm_op = lambda: None
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, optimizer=optimizer)
    return Trained(engine, engine.backward, safe_get_full_grad, engine.step)


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    start_two_processes(run)


if __name__ == "__main__":
    main()
