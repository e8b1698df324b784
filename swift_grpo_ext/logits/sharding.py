"""Keeps ranks that share a model's weights in step.

With ZeRO-3, FSDP and FSDP2 a module's call gathers its weights from all ranks. A rank that calls a
module more often than the others waits for them forever, in the backward too. Here the ranks agree
on the number of chunks, the method, and whether to run another forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor


class ShardRanks(NamedTuple):
    """The ranks that hold shards of one model; this rank alone if nothing is sharded."""

    groups: tuple[dist.ProcessGroup, ...] = ()  # one for each dimension of the device mesh
    device: torch.device | str = "cpu"  # of the tensors in the groups' collectives

    def highest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks."""
        if not self.groups:
            return values
        agreed = values.detach().to(self.device, copy=True)  # a copy: reduced in place
        # Reducing over each dimension of the mesh in turn gives the maximum over the whole mesh.
        for group in self.groups:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        return agreed.to(values.device)

    def all(self, holds: bool) -> bool:
        """Return whether `holds` is true on all ranks, on every rank."""
        return not self.highest(torch.tensor([not holds], dtype=torch.int32))


def shard_ranks(model: nn.Module) -> ShardRanks:
    """Return the ranks that DeepSpeed's ZeRO-3, FSDP or FSDP2 has sharded the weights over.

    Call it before the first forward: later, FSDP2 leaves some weights whole between passes.
    """
    # Check modules first: within FSDP's forward, its parameters look like ordinary ones.
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            if module.sharding_strategy == ShardingStrategy.NO_SHARD:  # as DDP
                continue
            return ShardRanks((module.process_group,), module.compute_device)
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):  # DeepSpeed's mark; it need not be installed
            return ShardRanks((parameter.ds_process_group,), parameter.device)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return ShardRanks(tuple(mesh.get_all_groups()), mesh.device_type)
    return ShardRanks()
