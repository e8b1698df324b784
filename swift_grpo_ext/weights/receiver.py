"""Loads and records weight updates in a server's vLLM workers. vLLM imports this module in every
worker process, possibly without registering the plugin.

Symptom: a failed update is only logged; ranks are missing from a new group after a replica died; a
worker waits up to 5 minutes for a trainer that does not come. Can go when ms-swift reports failed
updates, numbers living replicas, and has such timeouts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cached_property
from typing import Any

from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension

from swift_grpo_ext.upstream.accelerator import number_bits
from swift_grpo_ext.upstream.contract import verify_overrides
from swift_grpo_ext.upstream.weight_sync import bounded_rendezvous
from swift_grpo_ext.weights.update import EngineWeights

REPLICA_NUMBER = "SWIFT_ROLLOUT_DP_RANK"


class VerifiedWeightSyncWorkerExtension(WeightSyncWorkerExtension):
    """Extends ms-swift's worker extension, and records the weights that it loads."""

    @cached_property
    def engine_weights(self) -> EngineWeights:
        return EngineWeights(self.model_runner)

    def read_number_bits(self) -> int:
        return number_bits(self.vllm_config)

    def read_weight_report(self) -> dict[str, Any]:
        """Return the report of the last update, a `WeightReport` as a dictionary."""
        return asdict(self.engine_weights.report())

    def join_group(
        self,
        host: str,
        port: int,
        world_size: int,
        replica: int | None,
        timeout: float,
        watches: bool,
    ) -> None:
        """Join the trainer's group, in which each wait takes at most `timeout` seconds. `replica`
        is this replica's index among the living ones; None if the engine numbers them itself.
        """
        if watches:
            self.engine_weights.begin_watch()
        # ms-swift's extension (4.6, pipelines/infer/rollout.py) derives its rank from this
        # variable, the replica's number at the start. Restore it: the engine's names use it too.
        name = os.environ.get(REPLICA_NUMBER, "0")
        os.environ[REPLICA_NUMBER] = name if replica is None else str(replica)
        try:
            with bounded_rendezvous(rollout, timeout):
                self.init_communicator(host, port, world_size)
        finally:
            os.environ[REPLICA_NUMBER] = name

    def close_communicator(self) -> None:
        super().close_communicator()
        gc.collect()  # frees the store's port for a new group

    def _loading(self) -> AbstractContextManager[None]:
        return self.engine_weights.loading()  # overridden in cpu/receiver.py

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        with self._loading():
            super().update_named_param(name, dtype, shape)

    def update_flattened_params(self, metadatas: list[dict[str, Any]]) -> None:
        with self._loading():
            super().update_flattened_params(metadatas)

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        self.engine_weights.end(is_whole=True)

    def update_adapter_flattened_param(self, *args: Any, **kwargs: Any) -> None:
        with self.engine_weights.adapter():
            super().update_adapter_flattened_param(*args, **kwargs)

    def update_adapter_param(self, *args: Any, **kwargs: Any) -> None:
        with self.engine_weights.adapter():
            super().update_adapter_param(*args, **kwargs)


verify_overrides(VerifiedWeightSyncWorkerExtension)
