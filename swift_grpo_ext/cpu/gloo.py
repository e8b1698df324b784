"""Sends weights through gloo instead of NCCL."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair
from swift_grpo_ext.upstream.weight_sync import run_with_timeout

if TYPE_CHECKING:
    from vllm.distributed.utils import StatelessProcessGroup

DEFAULT_SECONDS = 300.0  # vLLM's default, for groups that ms-swift made before importing plugins


class GlooCommunicator:
    """Broadcasts CPU tensors through gloo; replaces vLLM's `PyNcclCommunicator`. Ranks meet through
    the store of `group`; `device` is ignored."""

    device = torch.device("cpu")

    def __init__(self, group: StatelessProcessGroup, device: object = None) -> None:
        self.group = group
        self._gloo: list[ProcessGroupGloo] = []
        # Gloo's threads must end before the interpreter does: they may abort the process.
        weakref.finalize(self, self._gloo.clear)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send `tensor` from rank `src` into the `tensor` of all others."""
        # Connecting in `__init__` would block a server before its trainer calls.
        if not self._gloo:
            rank, store = self.group.rank, PrefixStore("swift_grpo_ext/weights", self.group.store)
            seconds = getattr(self.group, "timeout", DEFAULT_SECONDS)  # for each wait
            bound = datetime.timedelta(seconds=seconds)
            meet = partial(ProcessGroupGloo, store, rank, self.group.world_size, bound)
            self._gloo.append(run_with_timeout(seconds, meet, rank))
        self._gloo[0].broadcast(tensor, root=src).wait()


@repair(PatchPhase.TRAINER)
def send_through_gloo() -> None:
    """Have ms-swift's client send weights through gloo. It has connected before plugins are
    imported: the groups of its disabled NCCL communicators are reused.

    Symptom: weights never reach a server: without an accelerator NCCL cannot load, the broadcast
    sends nothing, and the server waits forever; `synchronize()` calls torch.cuda.
    Upstream: ms-swift 4.6, rlhf_trainers/vllm_client.py. Can go when ms-swift can send on CPU.
    """
    from swift.rlhf_trainers import vllm_client

    def send(communicator: Any, tensors: Iterable[torch.Tensor]) -> None:
        if not hasattr(communicator, "gloo"):  # the first call for this server
            communicator.gloo = GlooCommunicator(communicator.group)
        for tensor in tensors:
            communicator.gloo.broadcast(tensor.detach().contiguous().cpu(), communicator.rank)

    patch(vllm_client, _broadcast_tensors_for_vllm_weight_sync=send)


@repair(PatchPhase.WORKER)
def receive_through_gloo() -> None:
    """Have a server's workers receive weights through gloo.

    Symptom: no weights arrive in a server's workers, as NCCL cannot load.
    Upstream: ms-swift 4.6, pipelines/infer/rollout.py. Can go when ms-swift can receive on CPU.
    """
    from swift.pipelines.infer import rollout

    def receive(communicator: GlooCommunicator, tensor: torch.Tensor, src: int) -> None:
        communicator.broadcast(tensor, src)

    patch(
        rollout,
        PyNcclCommunicator=GlooCommunicator,
        broadcast_tensor_for_vllm_weight_sync=receive,
        synchronize=lambda *_: None,
    )
