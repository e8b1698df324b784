"""Weight updates at the engine's end: loaded, and recorded as checksums for the trainer.

The trainer (`sync.py`) sends tensors and compares their checksums (`checksums.py`) with those that
each worker recorded here. vLLM imports this module in every process that holds a worker, the async
engine's own too, where no other part of the plugin is.

With ms-swift's own extension (4.6, pipelines/infer/rollout.py) a failed update is only logged, a
replica's rank in the group is its number at the start, which leaves a hole where one has ended, and
a worker waits up to 5 minutes for a trainer that does not come. Here a worker records what it has
loaded, and the server gives each replica its number among the living ones, and the bound of its
waits.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rlhf_trainers.utils import VLLM_LORA_INT_ID
from swift.utils import get_logger

from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.upstream.accelerator import number_bits
from swift_grpo_ext.upstream.weight_sync import bounded_rendezvous
from swift_grpo_ext.weights.checksums import (
    UNFILLED,
    Loads,
    WeightChecksums,
    note_unfilled,
    recorded_adapter,
    recorded_loads,
)
from swift_grpo_ext.weights.watch import WeightWatch

logger = get_logger()

REPLICA_NUMBER = "SWIFT_ROLLOUT_DP_RANK"


class VerifiedWeightSyncWorkerExtension(WeightSyncWorkerExtension):
    """ms-swift's worker extension, which records the weights that it has loaded."""

    _loads: Loads | None = None
    """Of the current update, or of the last one until another begins."""

    _update_has_ended = False
    _has_adapter = False
    """An adapter has come since the last update of whole weights."""

    _watch: WeightWatch | None = None
    _faults: tuple[str, ...] = ()
    _adapter_faults: tuple[str, ...] = ()
    """What is wrong with the weights, and with the adapter over them, in words."""

    def read_number_bits(self) -> int:
        """Return the size of this engine's numbers (`number_bits`)."""
        return number_bits(self.vllm_config)

    def read_weight_checksums(self) -> WeightChecksums:
        """Return the checksums of all that the last update loaded."""
        return self._loads.checksums if self._loads else {}

    def read_weight_faults(self) -> list[str] | None:
        """Return what is wrong with what the last update made, whoever its client is; None where
        nothing is known to be, and the watch has ended."""
        self._end_update()
        faults = [*self._faults, *self._adapter_faults]
        return None if self._watch is None and not faults else faults

    def _begin_watch(self) -> None:
        if self._watch is None and self._loads is None:  # before the first update
            runner = self.model_runner
            with self._looking():
                is_random = runner.load_config.load_format == "dummy"
                self._watch = WeightWatch(runner.model, runner.model_config, is_random=is_random)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Log a failure of the watch, which ends then: to look at weights must not end a run."""
        try:
            yield
        except Exception:
            self._watch, self._faults = None, ()
            logger.exception("The watch over weights has failed: further updates go unwatched.")

    def init_communicator(
        self,
        host: str,
        port: int,
        world_size: int,
        replica: int | None,
        timeout: float,
        watches: bool = True,
    ) -> None:
        """Join the trainer's group.

        Args:
            replica: the number of this replica among the living ones; None where one engine
                numbers its replicas itself.
            timeout: seconds for each wait of this group.
            watches: whether to look at what updates make of the weights.
        """
        if watches:
            self._begin_watch()
        # ms-swift's extension reads the number from there, and so does the engine for its name,
        # which stays.
        name = os.environ.get(REPLICA_NUMBER, "0")
        os.environ[REPLICA_NUMBER] = name if replica is None else str(replica)
        try:
            with bounded_rendezvous(rollout, timeout):
                super().init_communicator(host, port, world_size)
        finally:
            os.environ[REPLICA_NUMBER] = name

    def close_communicator(self) -> None:
        super().close_communicator()
        gc.collect()  # a new group may want the store's port

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        with self._recorded_loads():
            super().update_named_param(name, dtype, shape)

    def update_flattened_params(self, metadatas: list[dict[str, Any]]) -> None:
        with self._recorded_loads():
            super().update_flattened_params(metadatas)

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        if self._loads is not None:
            config = getattr(self.model_runner, "model_config", None)
            note_unfilled(self.model_runner.model, self._loads, config)
            self._judge()
        self._update_has_ended = True

    def _end_update(self) -> None:
        """Judge weights of a client that does not say when all have come."""
        if not self._update_has_ended:
            self._judge()
        self._update_has_ended = True

    def _judge(self) -> None:
        if self._watch is None or self._loads is None:
            return
        with self._looking():
            unfilled = self._loads.checksums.get(UNFILLED, "").split()
            self._faults = self._watch.judge(self.model_runner.model, unfilled)

    def update_adapter_flattened_param(
        self, peft_config: dict[str, Any], metadatas: list[dict[str, Any]]
    ) -> None:
        with self._recorded_adapter():
            super().update_adapter_flattened_param(peft_config, metadatas)

    def update_adapter_param(
        self, peft_config: dict[str, Any], lora_tensors_metadata: list[dict[str, Any]]
    ) -> None:
        with self._recorded_adapter():
            super().update_adapter_param(peft_config, lora_tensors_metadata)

    @contextmanager
    def _recorded_adapter(self) -> Iterator[None]:
        """Record an adapter, with the whole weights that it follows or by itself."""
        # The first adapter follows the base weights within one update, and the trainer compares
        # both; each later one is an update of its own.
        self._end_update()
        if self._has_adapter or self._loads is None:
            self._loads = Loads(filled=None)
        self._has_adapter = True
        manager = getattr(self.model_runner, "lora_manager", None)
        adapter: WeightChecksums = {}
        try:
            with recorded_adapter(manager) as adapter:
                yield
        finally:
            self._loads.checksums |= adapter
            self._adapter_faults = (adapter[ADAPTER_FAULT],) if ADAPTER_FAULT in adapter else ()
            if self._watch is not None and manager is not None and not self._adapter_faults:
                with self._looking():
                    held = manager._adapter_manager.get_adapter(VLLM_LORA_INT_ID)
                    self._adapter_faults = self._watch.judge_adapter(held.loras)

    def _note_arrived(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if self._watch is not None:
            with self._looking():
                self._watch.note_arrived(weights)

    @contextmanager
    def _recorded_loads(self) -> Iterator[None]:
        # An update arrives in many calls; the first one behind the end of the last starts over.
        if self._loads is None or self._update_has_ended:
            loads = Loads(note=self._note_arrived)
            self._loads, self._update_has_ended, self._has_adapter = loads, False, False
            self._adapter_faults = ()
        with recorded_loads(self.model_runner.model, self._loads):
            yield
