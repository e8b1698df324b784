"""Logits of other positions are never computed, and chunks bound the memory of the others [L2, L4].

`scripts/gpu.sh` runs this file too, with a real vocabulary.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from scripts.bench.measure import peak_bytes
from tests.rig.logits import models
from tests.rig.logits.batch import Batch, chosen
from tests.rig.logits.compare import DEVICE

ROWS = ((768, 256), (640, 192))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_take_no_more_memory_than_is_asked_for(dtype: str) -> None:
    small = {"vocab_size": 151_936 if DEVICE == "cuda" else 16_384, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = models.qwen2(**small, initializer_range=0.1, use_cache=False)
    model.to(DEVICE, getattr(torch, dtype))
    batch = Batch(ROWS).to(model)
    start = min(prompt for prompt, _ in ROWS) - 1

    def all_positions() -> Tensor:
        """As ms-swift: all from the first that any row predicts a completion at."""
        logits = model(**batch.inputs).logits[:, start:-1].float()
        targets = batch.inputs["input_ids"][:, start + 1 :, None]
        return logits.log_softmax(-1).gather(-1, targets)

    ways = {
        "all": all_positions,
        "chosen": partial(chosen, model, batch),
        "chunked": partial(chosen, model, batch, chunk_size=16),
    }
    peak = {}
    for name, way in ways.items():
        way().sum().backward()  # gradients are there from now on
        peak[name] = peak_bytes(lambda way=way: way().sum().backward())
    num_positions = batch.predicts_BT.numel()
    num_chosen = len(batch.targets_N)
    assert peak["chosen"] <= (num_chosen / num_positions + 0.05) * peak["all"]
    # A chunk is a 28th of the completions, which are a 5th of all positions; activations remain.
    assert peak["chunked"] <= 0.1 * peak["all"]
