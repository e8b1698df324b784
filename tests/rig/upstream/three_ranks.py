"""Gradients of three ranks: python -m tests.rig.upstream.three_ranks FOLDER

Three, since the sum of two numbers has only one order. The model has several buckets of 1 MB.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift_grpo_ext.upstream.determinism import sum_gradients_one_by_one
from tests.rig.ranks import start_processes

WIDTH = 600  # a layer's weights are 1.4 MB


def gradients(rank: int, *, one_by_one: bool) -> list[torch.Tensor]:
    """Return the gradients of three backward passes over one batch, of accelerate's model."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    ddp = DistributedDataParallelKwargs(bucket_cap_mb=1)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    if one_by_one:
        sum_gradients_one_by_one(accelerator)
    model = accelerator.prepare_model(nn.Sequential(*layers))
    assert isinstance(model, DistributedDataParallel)
    torch.manual_seed(rank)
    batch = torch.randn(4, 32)
    found = []
    for _ in range(3):
        model.zero_grad()
        model(batch).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def run(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    first, second, third = gradients(rank, one_by_one=False)
    assert torch.equal(second, third)
    assert not torch.equal(first, second), "torch rounds alike by itself: the adaptation can go"
    ours = gradients(rank, one_by_one=True)
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[1], ours[2])
    torch.testing.assert_close(ours[0], first)


if __name__ == "__main__":
    start_processes(run, 3)
