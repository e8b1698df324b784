"""Peak memory: logits of other positions are never computed, and chunks bound the others.

`python -m tests.stack.test_memory` prints a line of JSON with the bytes of each way to
log-probabilities, forward and backward. It is a process of its own, without other tests' memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from trl.trainer.utils import selective_log_softmax

from scripts.bench.measure import peak_bytes
from swift_grpo_ext.logits.shim import LogitsShim
from tests.rig.logits import models

VOCABULARY, CHUNK = 16_384, 16
LENGTHS = ((768, 256), (640, 192))
"""Tokens of each row's prompt and completion."""


def test_logits_take_no_more_memory_than_is_asked_for() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.stack.test_memory"],
        cwd=Path(__file__).resolve().parents[2], check=True, capture_output=True, text=True,
    )  # fmt: skip
    peak = json.loads(finished.stdout.splitlines()[-1])
    new, positions = sum(new for _, new in LENGTHS), len(LENGTHS) * max(map(sum, LENGTHS))
    assert peak["chosen"] <= (new / positions + 0.05) * peak["all"]
    # A chunk is a 28th of the completions, which are a 5th of all positions; activations remain.
    assert peak["chunked"] <= 0.1 * peak["all"]


def main() -> None:
    models.TEXT |= {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "initializer_range": 0.1}
    model, inputs = models.build("Qwen2"), models.inputs_of("Qwen2", tuple(map(sum, LENGTHS)))
    input_ids = inputs["input_ids"]
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (prompt, new) in enumerate(LENGTHS):
        mask[row, prompt - 1 : prompt + new - 1] = True
    targets = input_ids.roll(-1, 1)[mask]
    # As ms-swift: all positions from the first that any row predicts a completion at.
    start = min(prompt for prompt, _ in LENGTHS) - 1
    shim = LogitsShim(model, strict=True)

    def ours(chunk_size: int) -> Tensor:
        shim.chunk_size = chunk_size
        return shim.logps(model, inputs, mask, targets).logps_N

    def upstream() -> Tensor:
        logits = model(**inputs).logits
        return selective_log_softmax(logits[:, start:-1], input_ids[:, start + 1 :])

    ways: dict[str, Callable[[], Tensor]] = {
        "all": upstream,
        "chosen": lambda: ours(LogitsShim.chunk_size),
        "chunked": lambda: ours(CHUNK),
    }
    print(json.dumps({way: peak_of(values_of) for way, values_of in ways.items()}))


def peak_of(values_of: Callable[[], Tensor]) -> int:
    values_of().sum().backward()  # gradients are there from now on
    return peak_bytes(lambda: values_of().sum().backward())


if __name__ == "__main__":
    main()
