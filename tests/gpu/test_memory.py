"""The memory of a step's parts is read from a GPU [V5]."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swift_grpo_ext.timing import MEMORY_PARTS
from tests.rig.logits.batch import DEVICE
from tests.rig.timed import WORK, Trainer

GIB = 2**30


def fill(trainer: Any) -> None:
    """Leave 1 GiB on the GPU, as a pass with gradients."""
    trainer.filled = torch.zeros(GIB, dtype=torch.uint8, device=DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_each_part_has_its_memory() -> None:
    torch.cuda.empty_cache()  # else an earlier test's memory might serve
    trainer = Trainer(device=f"{DEVICE}:0", training_step=(*WORK["training_step"], fill))
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    trainer.begin()
    trainer.step()
    trainer.clock.log_memory([trainer.clock.memory.take()])
    log = trainer.logged()
    memory = {part: log[f"memory/{part}"] for part in MEMORY_PARTS}
    assert 0 < min(memory.values()) <= max(memory.values()) <= total, memory
    assert memory["loss"] >= memory["logps"] + 0.9, memory
