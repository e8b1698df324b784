"""Weights travel through gloo where there is no NCCL."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from swift_grpo_ext.upstream.patches import Moment, patch, repair
from swift_grpo_ext.upstream.weight_sync import run_with_timeout

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup


DEFAULT_SECONDS = 300.0
"""vLLM's own bound of a rendezvous, for a group that ms-swift made before plugins were imported."""


class GlooCommunicator:
    """Broadcasts CPU tensors through gloo, in the place of vLLM's `PyNcclCommunicator`.

    Args:
        group: vLLM's `StatelessProcessGroup`; its store is the rendezvous, and its barrier the
            barrier.
        device: ms-swift's; tensors lie in the CPU's memory.
    """

    device = torch.device("cpu")

    def __init__(self, group: StatelessProcessGroup, device: object = None) -> None:
        self.group = group
        self._gloo: list[ProcessGroupGloo] = []
        # Its threads end with it, or at exit: one that outlives the interpreter may abort it.
        weakref.finalize(self, self._gloo.clear)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send `tensor` from rank `src`; every other rank's is overwritten.

        The first call meets all ranks: connecting any earlier would block a server that a trainer
        has still to reach.
        """
        if not self._gloo:
            rank, store = self.group.rank, PrefixStore("swift_grpo_ext/weights", self.group.store)
            seconds = getattr(self.group, "timeout", DEFAULT_SECONDS)
            bound = datetime.timedelta(seconds=seconds)
            meet = partial(ProcessGroupGloo, store, rank, self.group.world_size, bound)
            self._gloo.append(run_with_timeout(seconds, meet, rank))
        # Every wait has the bound that the group was made with.
        self._gloo[0].broadcast(tensor, root=src).wait()


@repair(
    Moment.TRAINER,
    symptom="Weights never reach a server: without an accelerator NCCL cannot load, the "
    "broadcast sends nothing, and the server waits for ever; `synchronize()` calls "
    "torch.cuda all the same.",
    upstream="ms-swift 4.6, rlhf_trainers/vllm_client.py.",
    until="ms-swift has a communicator for CPU",
)
def send_through_gloo() -> None:
    """Let ms-swift's client send weights through gloo.

    It connects before plugins are imported: what it has by then are communicators of NCCL, which
    are disabled, and whose groups serve.
    """
    from swift.rlhf_trainers import vllm_client

    def send(communicator: PyNcclCommunicator, tensors: Iterable[torch.Tensor]) -> None:
        held: Any = communicator
        if not hasattr(held, "gloo"):  # made once for each server, and kept with its communicator
            held.gloo = GlooCommunicator(held.group)
        for tensor in tensors:
            held.gloo.broadcast(tensor.detach().contiguous().cpu(), communicator.rank)

    patch(vllm_client, _broadcast_tensors_for_vllm_weight_sync=send)


@repair(
    Moment.WORKER,
    symptom="The same, at the end of a server's workers: no weights arrive.",
    upstream="ms-swift 4.6, pipelines/infer/rollout.py.",
    until="ms-swift has a communicator for CPU",
)
def receive_through_gloo() -> None:
    """Let ms-swift's workers receive weights through gloo."""
    from swift.pipelines.infer import rollout

    def receive(communicator: GlooCommunicator, tensor: torch.Tensor, src: int) -> None:
        communicator.broadcast(tensor, src)

    patch(
        rollout,
        PyNcclCommunicator=GlooCommunicator,
        broadcast_tensor_for_vllm_weight_sync=receive,
        synchronize=lambda *_: None,
    )
