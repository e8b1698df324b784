"""Weight updates from the trainer to `swift rollout` where there is no accelerator.

Symptom: NCCL cannot load, so the broadcast sends nothing and the server waits for ever; ms-swift's
`synchronize()` calls torch.cuda in any case; and vLLM's CPU layers pack their weights and drop the
originals, so that `model.load_weights` fails (`'Parameter' object has no attribute
'weight_loader'`).
Upstream: ms-swift 4.6, rlhf_trainers/vllm_client.py, pipelines/infer/rollout.py; vLLM 0.32,
model_executor/layers/utils.py (`dispatch_cpu_unquantized_gemm`).
Adaptation: tensors travel through gloo, over the rendezvous store that both sides have made; the
server collects them, and reloads the model once all have come.
Can go when ms-swift has a communicator for CPU and reloads through vLLM's `reload_weights`.
"""

from __future__ import annotations

import atexit
import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from swift.rlhf_trainers import vllm_client as upstream_client
from swift.rlhf_trainers.utils import FlattenedTensorBucket, FlattenedTensorMetadata
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from swift_grpo_ext.upstream.contract import Pin, verify
from swift_grpo_ext.upstream.verified_weights import VerifiedWeightSyncWorkerExtension
from swift_grpo_ext.weights import receipt_meanwhile

PINS = (
    Pin("swift.pipelines.infer.rollout", "WeightSyncWorkerExtension.process_weights_after_loading",
        ("self",)),
    Pin("swift.rlhf_trainers.vllm_client", "_broadcast_tensors_for_vllm_weight_sync",
        ("communicator", "tensors")),
    Pin("swift.rlhf_trainers.utils", "FlattenedTensorBucket", ("named_tensors", "flattened_tensor",
        "metadata")),
    Pin("swift.rlhf_trainers.utils", "finish_vllm_weight_reload",
        ("vllm_model", "model_config", "target_device")),
    Pin("vllm.distributed.utils", "StatelessProcessGroup", ("rank", "world_size", "store")),
    Pin("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights",
        ("self", "weights_iterator", "weights_path", "is_checkpoint_format")),
)  # fmt: skip
verify(PINS)

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
        self._gloo: ProcessGroupGloo | None = None

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send `tensor` from rank `src`; every other rank's is overwritten.

        The first call meets all ranks: connecting any earlier would block a server that a trainer
        has still to reach.
        """
        if self._gloo is None:
            store = PrefixStore("swift_grpo_ext/weights", self.group.store)
            self._gloo = ProcessGroupGloo(store, self.rank, self.world_size, BROADCAST_TIMEOUT)
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Join gloo's threads: one that outlives the interpreter may abort the process."""
        self._gloo = None


def connect_client(client: Any) -> None:
    """Let a connected `VLLMClient` send through gloo; the servers' workers do the same."""
    client.pynccl_comms = [GlooCommunicator(comm.group) for comm in client.pynccl_comms]
    for comm in client.pynccl_comms:
        atexit.register(comm.close)
    upstream_client._broadcast_tensors_for_vllm_weight_sync = _broadcast_tensors


def _broadcast_tensors(communicator: GlooCommunicator, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        communicator.broadcast(tensor.detach().contiguous().cpu(), src=communicator.rank)


class CPUWeightSyncWorkerExtension(VerifiedWeightSyncWorkerExtension):
    """The same, receiving through gloo and reloading packed weights."""

    communicator: Any = None
    """ms-swift's own, until `init_communicator` has put a `GlooCommunicator` in its place."""

    def init_communicator(
        self, host: str, port: int, world_size: int, replica: int | None = None
    ) -> None:
        if self.communicator is None:
            super().init_communicator(host, port, world_size, replica)
            disabled: Any = self.communicator
            self.communicator = GlooCommunicator(disabled.group)
            self._received: list[tuple[str, torch.Tensor]] = []

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype.split(".")[-1]))
        self._receive(weight)
        self._received.append((name, weight))

    def update_flattened_params(self, metadatas: list[dict[str, Any]]) -> None:
        self._received += self._receive_bucket(metadatas).items()

    def process_weights_after_loading(self) -> None:
        """Reload the model with all that was received since the last reload."""
        received, self._received = self._received, []
        new = receipt_meanwhile(received)
        self.model_runner.reload_weights(weights_iterator=iter(received))
        # `reload_weights` leaves a tied head with the packed weights of before (vLLM 0.32).
        super().process_weights_after_loading()
        self.note_loaded(new())

    def _receive(self, tensor: torch.Tensor) -> None:
        if self.communicator is None:
            raise RuntimeError("A weight update came before `init_communicator`.")
        self.communicator.broadcast(tensor, src=self.client_rank)
        self.communicator.group.barrier()

    def _receive_bucket(self, metadatas: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        metadata = [FlattenedTensorMetadata(**m) for m in metadatas]
        flattened = torch.empty(metadata[-1].end_idx, dtype=torch.uint8)
        self._receive(flattened)
        bucket = FlattenedTensorBucket(metadata=metadata, flattened_tensor=flattened)
        return bucket.reconstruct_tensors()
