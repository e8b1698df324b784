"""Weights travel through gloo where there is no NCCL, and a colocated engine reloads what it packs;
`patches.py` says why."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from swift_grpo_ext.upstream.patches import patch
from swift_grpo_ext.upstream.weight_sync import within

if TYPE_CHECKING:
    from vllm.distributed.utils import StatelessProcessGroup


class GlooCommunicator:
    """Broadcasts CPU tensors through gloo, in the place of vLLM's `PyNcclCommunicator`.

    Args:
        group: vLLM's `StatelessProcessGroup`; its store is the rendezvous, and its barrier the
            barrier.
        device: ms-swift's; tensors lie in the CPU's memory.
    """

    timeout = 300.0
    """Seconds for each wait, until `bounded_broadcasts` says another."""

    def __init__(self, group: StatelessProcessGroup, device: object = "cpu") -> None:
        self.group = group
        self.rank: int = group.rank
        self.world_size: int = group.world_size
        self.device = torch.device("cpu")
        self._gloo: list[ProcessGroupGloo] = []
        # Its threads end with it, or at exit: one that outlives the interpreter may abort it.
        weakref.finalize(self, self._gloo.clear)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send `tensor` from rank `src`; every other rank's is overwritten.

        The first call meets all ranks: connecting any earlier would block a server that a trainer
        has still to reach.
        """
        if not self._gloo:
            store = PrefixStore("swift_grpo_ext/weights", self.group.store)
            bound = datetime.timedelta(seconds=self.timeout)
            meet = partial(ProcessGroupGloo, store, self.rank, self.world_size, bound)
            self._gloo.append(within(self.timeout, meet, self.rank))
        self._gloo[0].broadcast(tensor, root=src).wait()


def send_through_gloo() -> None:
    """Let ms-swift's client send weights through gloo."""
    from swift.rlhf_trainers import vllm_client

    def broadcast(communicator: GlooCommunicator, tensor: torch.Tensor, src: int) -> None:
        communicator.broadcast(tensor.detach().contiguous().cpu(), src=src)

    def broadcast_all(communicator: GlooCommunicator, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            broadcast(communicator, tensor, communicator.rank)

    patch(
        vllm_client,
        PyNcclCommunicator=GlooCommunicator,
        _broadcast_tensors_for_vllm_weight_sync=broadcast_all,
        # ms-swift before 4.5.3 sends them singly, and waits for a device.
        broadcast_tensor_for_vllm_weight_sync=broadcast,
        synchronize=lambda *_: None,
    )


def receive_through_gloo() -> None:
    """Let ms-swift's workers receive weights through gloo."""
    from swift.pipelines.infer import rollout

    patch(
        rollout,
        PyNcclCommunicator=GlooCommunicator,
        broadcast_tensor_for_vllm_weight_sync=GlooCommunicator.broadcast,
        synchronize=lambda *_: None,
    )
