"""Two ranks under DDP on CPU (gloo), each with rows of its own: what training by ours and by full
logits comes to.

    python -m tests.logits.two_ranks FOLDER

Writes `FOLDER/rank0.pt`: for each case, the two gradients of rank 0 after their reduction.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from swift_grpo_ext.logits import LogitsShim
from tests.logits import models

CASES = [
    (chunk_size, lora, find_unused)
    for chunk_size in (0, 4)
    for lora in (False, True)
    for find_unused in (False, True)
]
STEPS = 2


def run(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    results = {case: compare(rank, *case) for case in CASES}
    if rank == 0:
        torch.save(results, f"{folder}/rank0.pt")
    dist.destroy_process_group()


def compare(rank: int, chunk_size: int, lora: bool, find_unused: bool) -> list[Any]:
    model = models.build("Qwen2.5-VL", lora=lora)
    inputs = models.inputs_of("Qwen2.5-VL", (17 - rank, 11 + rank))
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    mask[:, 6 : 10 - rank] = True
    targets = inputs["input_ids"][mask]
    wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused)
    shim = LogitsShim(wrapped, strict=True)

    def ours() -> Tensor:
        return shim.logps(wrapped, inputs, mask, targets, chunk_size=chunk_size).logps_N

    def plain() -> Tensor:
        log_p = wrapped(**inputs).logits[mask].log_softmax(-1)
        return log_p.gather(-1, targets[:, None])[:, 0]

    return [gradients(model, values_of) for values_of in (ours, plain)]


def gradients(model: Any, values_of: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Of the second of two steps: a reducer that counted amiss in the first fails in it."""
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        values_of().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.start_processes(
        run, (str(Path(sys.argv[1]).resolve()),), nprocs=2, start_method="fork"
    )


if __name__ == "__main__":
    main()
