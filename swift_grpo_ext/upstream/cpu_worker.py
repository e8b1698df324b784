"""What vLLM's workers of `swift rollout` need where there is no accelerator.

vLLM imports this module in every process that holds a worker, the async engine's own too, where no
other part of the plugin is.

Symptom: ms-swift's `synchronize()` calls torch.cuda in any case, and vLLM's CPU layers pack their
weights and drop the originals, so that `model.load_weights` fails (`'Parameter' object has no
attribute 'weight_loader'`).
Upstream: ms-swift 4.6, pipelines/infer/rollout.py; vLLM 0.32, model_executor/layers/utils.py
(`dispatch_cpu_unquantized_gemm`).
Adaptation: the worker collects the tensors, and reloads the model once all have come.
Can go when ms-swift reloads through vLLM's `reload_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from swift.rlhf_trainers.utils import FlattenedTensorBucket, FlattenedTensorMetadata

from swift_grpo_ext.upstream import shared_memory, split_prefill
from swift_grpo_ext.upstream.weight_sync import GlooCommunicator
from swift_grpo_ext.weights.checksums import weight_checksums_in_background
from swift_grpo_ext.weights.receiver import VerifiedWeightSyncWorkerExtension

split_prefill.install()
shared_memory.install()


class CPUWeightSyncWorkerExtension(VerifiedWeightSyncWorkerExtension):
    """The same, receiving through gloo and reloading packed weights."""

    communicator: Any = None
    """ms-swift's own, until `init_communicator` has put a `GlooCommunicator` in its place."""

    def init_communicator(
        self,
        host: str,
        port: int,
        world_size: int,
        replica: int | None = None,
        timeout: float | None = None,
    ) -> None:
        if self.communicator is None:
            super().init_communicator(host, port, world_size, replica, timeout)
            disabled: Any = self.communicator
            self.communicator = GlooCommunicator(disabled.group, timeout)
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
        new = weight_checksums_in_background(received)
        self.model_runner.reload_weights(weights_iterator=iter(received))
        self.record_loaded(new())
        # `reload_weights` leaves a tied head with the packed weights of before (vLLM 0.32).
        super().process_weights_after_loading()

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
