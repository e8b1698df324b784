"""Weight updates at the server's end: noted, for the trainer to compare, and open to newcomers.

Symptom: a failed update is only logged, and rollouts go on from old weights. A replica's rank among
those that receive is its number at the start, which leaves a hole where a replica has ended.
Upstream: ms-swift 4.6, pipelines/infer/rollout.py, `WeightSyncWorkerExtension`.
Adaptation: a replica notes what it has loaded, and is told its number among those that live.
Can go when ms-swift verifies its updates, and numbers the replicas that live.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swift.pipelines.infer.rollout import WeightSyncWorkerExtension

from swift_grpo_ext.weights.checksums import WeightChecksums, recorded_loads, weight_checksums

REPLICA_NUMBER = "SWIFT_ROLLOUT_DP_RANK"


class VerifiedWeightSyncWorkerExtension(WeightSyncWorkerExtension):
    """ms-swift's worker extension, which notes the weights that it has loaded."""

    loaded_weights: WeightChecksums | None = None

    def take_weight_checksums(self) -> WeightChecksums:
        """Of all that was loaded since this was last asked."""
        taken, self.loaded_weights = self.loaded_weights or {}, None
        return taken

    def record_loaded(self, new: WeightChecksums) -> None:
        self.loaded_weights = {**(self.loaded_weights or {}), **new}

    def init_communicator(
        self, host: str, port: int, world_size: int, replica: int | None = None
    ) -> None:
        """Join the trainer's group.

        Args:
            replica: the number of this replica among those that live; None where there is one
                engine for all, which numbers them itself.
        """
        with _replica_number(replica):
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
