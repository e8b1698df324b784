"""A plugin for `weight_updates.py`: writes down how long weight updates take, with and without
verification, in turns.

Loaded after `plugins/grpo_ext.py`, by trainer and server; the file comes from the environment
variable `UPDATE_TIMES`. One JSON line for each update.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from swift.trainers import TrainerFactory

from swift_grpo_ext.training import RolloutGRPOTrainer
from swift_grpo_ext.weights import receiver
from swift_grpo_ext.weights import updates as trainer_weights
from swift_grpo_ext.weights.receiver import CPUWeightSyncWorkerExtension


def nothing(*_: Any) -> dict[str, str]:
    return {}


def switch(module: Any, names: tuple[str, ...], *, on: bool) -> None:
    """Let a module's functions verify, or do nothing."""
    for name in names:
        value = ORIGINAL[module.__name__, name]
        skipped = (lambda *_: nothing) if name == "weight_checksums_in_background" else nothing
        setattr(module, name, value if on else skipped)


OF_TRAINER = ("compare", "compare_tensors", "weight_checksums_in_background")
OF_WORKER = ("weight_checksums_in_background",)
ORIGINAL = {
    (module.__name__, name): getattr(module, name)
    for module, names in ((trainer_weights, OF_TRAINER), (receiver, OF_WORKER))
    for name in names
}


class TimedTrainer(RolloutGRPOTrainer):
    updates = 0

    def _move_model_to_vllm(self, *args: Any, **kwargs: Any) -> None:
        is_verified = self.updates % 2 == 1
        self.updates += 1
        switch(trainer_weights, OF_TRAINER, on=is_verified)
        start = time.perf_counter()
        super()._move_model_to_vllm(*args, **kwargs)
        seconds = time.perf_counter() - start
        with Path(os.environ["UPDATE_TIMES"]).open("a", encoding="utf-8") as f:
            f.write(json.dumps({"verified": is_verified, "seconds": seconds}) + "\n")


class TimedExtension(CPUWeightSyncWorkerExtension):
    updates = 0

    def process_weights_after_loading(self) -> None:
        switch(receiver, OF_WORKER, on=self.updates % 2 == 1)
        self.updates += 1
        super().process_weights_after_loading()


receiver.CPUWeightSyncWorkerExtension = TimedExtension  # type: ignore[misc]
TrainerFactory.TRAINER_MAPPING["grpo"] = "timed_updates.TimedTrainer"
