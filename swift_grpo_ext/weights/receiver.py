"""Weight updates at the engine's end: loaded, and recorded as checksums for the trainer.

The trainer (`updates.py`) sends tensors and compares their checksums (`checksums.py`) with those
that each worker recorded here.

Symptom: a failed update is only logged, and rollouts go on from old weights. A replica's rank in
the group is its number at the start, which leaves a hole where a replica has ended. A worker waits
up to 5 minutes for a trainer that does not come.
Upstream: ms-swift 4.6, pipelines/infer/rollout.py, `WeightSyncWorkerExtension`.
Adaptation: a worker records what it has loaded. The server gives each replica its number among the
living ones, and the bound of its waits.
Can go when ms-swift verifies its updates, numbers the living replicas and bounds its waits.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension

from swift_grpo_ext.upstream.weight_sync import bounded_rendezvous
from swift_grpo_ext.weights.checksums import WeightChecksums, recorded_loads, weight_checksums

REPLICA_NUMBER = "SWIFT_ROLLOUT_DP_RANK"


class VerifiedWeightSyncWorkerExtension(WeightSyncWorkerExtension):
    """ms-swift's worker extension, which records the weights that it has loaded."""

    _loaded: WeightChecksums | None = None
    """Of the current update, or of the last one until another begins."""

    _update_has_ended = False

    def read_weight_checksums(self) -> WeightChecksums:
        """Of all that the last update loaded. Reading them again gives the same."""
        return self._loaded or {}

    def record_loaded(self, new: WeightChecksums) -> None:
        before = {} if self._update_has_ended else self._loaded or {}
        self._loaded, self._update_has_ended = {**before, **new}, False

    def init_communicator(
        self,
        host: str,
        port: int,
        world_size: int,
        replica: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Join the trainer's group.

        Args:
            replica: the number of this replica among the living ones; None where one engine
                numbers its replicas itself.
            timeout: seconds for each wait of this group; None leaves vLLM's bounds.
        """
        with _replica_number(replica), bounded_rendezvous(rollout, timeout):
            super().init_communicator(host, port, world_size)

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
        self._update_has_ended = True

    @contextmanager
    def _recorded_loads(self) -> Iterator[None]:
        with recorded_loads(self.model_runner.model) as taken:
            yield
        self.record_loaded(weight_checksums(taken))


@contextmanager
def _replica_number(number: int | None) -> Iterator[None]:
    """ms-swift's extension reads the replica's number from the environment."""
    before = os.environ.get(REPLICA_NUMBER)
    if number is not None:
        os.environ[REPLICA_NUMBER] = str(number)
    try:
        yield
    finally:
        if before is not None:
            os.environ[REPLICA_NUMBER] = before
        else:
            os.environ.pop(REPLICA_NUMBER, None)
