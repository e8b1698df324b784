"""Prints the peak memory, forward and backward, of several ways to a model's log-probabilities.

    python -m tests.logits.memory

One line of JSON: for each model that transformers knows, the bytes of each way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from trl.trainer.utils import selective_log_softmax

from scripts.bench.peak import peak_bytes
from swift_grpo_ext.logits.shim import LogitsShim
from tests.logits import models

VOCABULARY, PROMPT, NEW, CHUNK = 16_384, 768, 256, 16
NAMES = ("Qwen2", "VideoLlama3", "swallows keywords")


def main() -> None:
    models.TEXT |= {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "initializer_range": 0.1}
    has_family = hasattr(transformers, "VideoLlama3Config")
    known = [name for name in NAMES if name != "VideoLlama3" or has_family]
    print(json.dumps({name: measure(name) for name in known}))


def measure(name: str) -> dict[str, int]:
    model = models.build(name)
    inputs = models.inputs_of("Qwen2", (PROMPT + NEW,))
    targets = inputs["input_ids"][0, PROMPT:]
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    mask[:, PROMPT - 1 : -1] = True
    shim = LogitsShim(model, strict=True)

    def upstream(logits: Tensor) -> Tensor:
        return selective_log_softmax(logits[:, -(NEW + 1) : -1], targets[None])

    def ours(chunk_size: int) -> Tensor:
        return shim.logps(model, inputs, mask, targets, chunk_size=chunk_size).logps_N

    ways: dict[str, Callable[[], Tensor]] = {
        "all": lambda: upstream(model(**inputs).logits),
        "last": lambda: upstream(shim.last(model, inputs, NEW + 1).logits),
        "chosen": lambda: ours(0),
        "chunked": lambda: ours(CHUNK),
    }
    return {way: peak_of(model, values_of) for way, values_of in ways.items()}


def peak_of(model: Any, values_of: Callable[[], Tensor]) -> int:
    model.zero_grad(set_to_none=True)
    values_of().sum().backward()  # gradients are there from now on
    return peak_bytes(lambda: values_of().sum().backward())


if __name__ == "__main__":
    main()
