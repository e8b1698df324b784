"""The memory of a step's parts is read from a GPU [V5]."""

from __future__ import annotations

import pytest
import torch

from swift_grpo_ext.timing import MEMORY_PARTS
from tests.rig.logits.compare import DEVICE
from tests.unit.timing.test_step_clock import Trainer, begin, logged, step

GIB = 2**30


class Filling(Trainer):
    """Its passes with gradients leave 1 GiB on the GPU."""

    def _get_per_token_logps_and_entropies(self, seconds: float) -> None:
        super()._get_per_token_logps_and_entropies(seconds)
        if seconds == 32:
            self.filled = torch.zeros(GIB, dtype=torch.uint8, device=DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_each_part_has_its_memory() -> None:
    torch.cuda.empty_cache()  # else an earlier test's memory might serve
    trainer = Filling()
    trainer.accelerator.device = torch.device(DEVICE, 0)
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    step(trainer, clock := begin(trainer))
    clock.log_memory([clock.memory.take()])
    log = logged(trainer)
    memory = {part: log[f"memory/{part}"] for part in MEMORY_PARTS}
    assert 0 < min(memory.values()) <= max(memory.values()) <= total, memory
    assert memory["loss"] >= memory["logps"] + 0.9, memory
