"""Weight updates from the trainer to `swift rollout` where there is no accelerator.

Symptom: NCCL cannot load, so the broadcast sends nothing and the server waits for ever.
Upstream: ms-swift 4.6, rlhf_trainers/vllm_client.py.
Adaptation: tensors travel through gloo, over the rendezvous store that both sides have made
(`cpu_worker.py` is the other end).
Can go when ms-swift has a communicator for CPU.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from swift.rlhf_trainers import vllm_client as upstream_client
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

BROADCAST_TIMEOUT = datetime.timedelta(minutes=30)


class GlooCommunicator:
    """Broadcasts CPU tensors through gloo, in the place of vLLM's `PyNcclCommunicator`.

    Args:
        group: vLLM's `StatelessProcessGroup`; its store is the rendezvous, and its barrier the
            barrier.
    """

    def __init__(self, group: Any) -> None:
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
            size, timeout = self.world_size, BROADCAST_TIMEOUT
            self._gloo.append(ProcessGroupGloo(store, self.rank, size, timeout))
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo[0].broadcast([tensor], options).wait()


def connect_client(client: Any) -> None:
    """Let a connected `VLLMClient` send through gloo; the servers' workers do the same."""
    client.pynccl_comms = [GlooCommunicator(comm.group) for comm in client.pynccl_comms]
    upstream_client._broadcast_tensors_for_vllm_weight_sync = _broadcast_tensors


def _broadcast_tensors(communicator: GlooCommunicator, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        communicator.broadcast(tensor.detach().contiguous().cpu(), src=communicator.rank)
