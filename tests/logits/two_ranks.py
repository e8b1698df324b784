"""Two ranks on CPU (gloo), each with rows of its own: what training by ours and by full logits
comes to, under DDP and with sharded weights.

    python -m tests.logits.two_ranks FOLDER

Writes `FOLDER/rankR.pt`: for each case of DDP, the two gradients after their reduction; for each
case of `sharded.py`, what its `compare` returns, or the error; for each of `HEADS`, its `logps`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from swift_grpo_ext.logits.shim import LogitsShim
from tests.logits import models, sharded
from tests.ranks import start_two_processes

CASES = [
    (chunk_size, lora, find_unused)
    for chunk_size in (0, 4)
    for lora in (False, True)
    for find_unused in (False, True)
]
HEADS = [
    (release, is_alone)
    for release in ("2.8.0+cu128", "2.10.0", "2.11.0+cpu")
    for is_alone in (True, False)
]
"""A release that torch is taken for, and whether the head is a unit of its own in FSDP2."""

STEPS = 2
WAIT = timedelta(seconds=120)
"""A collective that only one rank takes part in fails after it; a busy machine may hold one up."""


def run(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
    torch.set_num_threads(1)
    results: dict[Any, Any] = {case: compare(rank, *case) for case in CASES}
    results |= {head: logps(*head) for head in HEADS}
    for case in sharded.CASES:
        try:
            results[tuple(case)] = sharded.compare(rank, case, sharded.gathered_or_fsdp2)
        except RuntimeError as e:  # the group is lost: each further case would wait
            results[tuple(case)] = {"error": f"{type(e).__name__}: {e}"}
            break
    torch.save(results, f"{folder}/rank{rank}.pt")
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


def logps(release: str, is_alone: bool) -> dict[str, Any]:
    """Log-probabilities of a sharded model in chunks, twice, beside those of the whole one."""
    model, inputs = models.build("Qwen2"), models.inputs_of("Qwen2")
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    mask[:, 4:10] = True
    warned: list[str] = []

    def of_pass(shim: LogitsShim, chunk_size: int = 0) -> Tensor:
        targets = inputs["input_ids"][mask]
        return shim.logps(model, inputs, mask, targets, chunk_size=chunk_size).logps_N.detach()

    with patch.object(torch, "__version__", release):
        expected = of_pass(LogitsShim(model, warn=warned.append))
        fully_shard([model.lm_head] if is_alone else [model.model.norm, model.lm_head])
        fully_shard(model)
        shim = LogitsShim(model, warn=warned.append)
        found = [of_pass(shim, chunk_size=4) for _ in range(2)]
    return {"found": found, "expected": expected, "warned": warned}


def gradients(model: Any, values_of: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Of the second of two steps: a reducer that counted amiss in the first fails in it."""
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        values_of().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    start_two_processes(run)
