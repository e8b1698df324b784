"""Two ranks on CPU (gloo) whose batches fold at different times, under DDP and FSDP2.

    python -m tests.logits.shared_ranks FOLDER

Writes `FOLDER/rankR.pt`: for each of `CASES`, this rank's log-probabilities and the reduced
gradients of each step (`found`), those of ms-swift's passes over whole models (`expected`), and how
many positions the decoder read in each of this rank's passes (`positions`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.logits import models
from tests.logits.test_logps import Ours, Upstream, config_of
from tests.logits.test_shared_prompt import ROWS, Group, make_pass, positions_of
from tests.logits.two_ranks import WAIT
from tests.ranks import start_two_processes

APART = ((9, 4, 0, 0), (12, 3, 0, 0))
"""Of two prompts: nothing to fold."""

BATCHES = ((ROWS, APART), (ROWS, ROWS))
"""Of each step, each rank's."""

CASES = ["DDP", "DDP, a pass more on rank 0", "DDP, the loss alone", "FSDP2"]


def run(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
    torch.set_num_threads(1)
    torch.save({case: compare(rank, case) for case in CASES}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def compare(rank: int, case: str) -> dict[str, Any]:
    model = models.build("Qwen2")
    seen = positions_of(model)
    if case == "FSDP2":
        for unit in (*model.model.layers, model.lm_head, model):
            fully_shard(unit)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model)
    ours = trainer_of(Ours)
    found = []
    for batches in BATCHES:
        batch = Group(batches[rank])
        model.zero_grad()  # first: after a pass, FSDP2's root holds whole weights
        # As in ms-swift, passes without gradients see the model without DDP.
        for _ in range(1 + (case.endswith("rank 0") and rank == 0)):
            if not case.endswith("alone"):
                make_pass(ours, model, batch)
        logps = loss_pass(ours, wrapped, batch)
        dist.all_reduce(torch.zeros(1))  # as of the round: it has to meet its like
        gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
        found.append((logps, gradients))
    return {"found": found, "expected": expected(rank), "positions": seen}


def expected(rank: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What ms-swift's passes of both ranks come to."""
    steps = []
    for batches in BATCHES:
        values, gradients = [], []
        for rows in batches:
            model = models.build("Qwen2")
            values.append(loss_pass(trainer_of(Upstream), model, Group(rows)))
            gradients.append({n: p.grad for n, p in model.named_parameters()})
        mean = {n: (gradients[0][n] + gradients[1][n]) / 2 for n in gradients[0]}
        steps.append((values[rank], mean))
    return steps


def trainer_of(host: type[Any]) -> Any:
    config = config_of(logps_shared_prompt=True)
    return host(config, keys={"logits_to_keep"}, padding_free=False)


def loss_pass(trainer: Any, model: Any, batch: Group) -> Tensor:
    """Log-probabilities of completion tokens, after a backward of their sum."""
    grpo_batch = batch.grpo_batch()
    logps_BK, _ = trainer._get_per_token_logps_and_entropies_single(
        model, dict(batch.inputs), grpo_batch
    )
    values: Tensor = logps_BK[grpo_batch.completion_mask]
    values.sum().backward()
    return values.detach()


def whole(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.clone()


if __name__ == "__main__":
    start_two_processes(run)
