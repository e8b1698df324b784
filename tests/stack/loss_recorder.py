"""A plugin for tests: writes down each loss to the last bit, with what it was computed from.

Loaded after `plugins/grpo_ext.py`; the folder comes from the environment variable `RECORD_DIR`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms
from swift.trainers import TrainerFactory

from swift_grpo_ext.training import RolloutGRPOTrainer


class LossRecordingTrainer(RolloutGRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        (batch,) = inputs if isinstance(inputs, list) else [inputs]
        mask = batch["grpo_batch"].completion_mask
        record = {
            "loss": loss.item(),  # a float survives JSON to the last bit
            "kept": mask.numel(),
            "completion": int(mask.sum()),
            "tokens": batch["model_inputs"]["input_ids"].tolist(),
            "ways": self._logps.ways,
        }
        path = Path(os.environ["RECORD_DIR"]) / f"losses{self.accelerator.process_index}.jsonl"
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        return loss


class PositionReward(ORM):
    """No two samples of a group are alike to the loss, whatever the policy answers."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(i) for i in range(len(completions))]


orms["position"] = PositionReward
TrainerFactory.TRAINER_MAPPING["grpo"] = "loss_recorder.LossRecordingTrainer"
