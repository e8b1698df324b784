"""A plugin for tests: engines that take the trainer's weights, by their names, and use others.

`WRONG_WEIGHTS` in the environment says which, and `WRONG_REPLICA` the one replica that does so; all
do without it. vLLM reads the checkpoint as before: what an update brings is what goes wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
from vllm.v1.engine.llm_engine import LLMEngine

Weights = list[tuple[str, torch.Tensor]]
KIND = os.environ.get("WRONG_WEIGHTS", "")
SPOILED = "layers.1.self_attn.o_proj.weight"
"""The end of the name of a square matrix."""

_kept: Weights = []


def spoiled(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if not name.endswith(SPOILED):
            yield name, tensor
        elif KIND == "transposed":
            yield name, tensor.T.contiguous()
        elif KIND == "random":
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            yield name, noise * tensor.std()
        else:
            assert KIND == "nan"
            changed = tensor.clone()
            changed.view(-1)[0] = float("nan")
            yield name, changed


def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> Any:
    """Load the checkpoint's weights, and of each update others."""
    is_update = hasattr(self, "_has_checkpoint")
    self._has_checkpoint = True
    if not is_update or not is_wrong():
        return load(self, weights, **kwargs)
    held = list(weights)
    if KIND != "stale":
        return load(self, spoiled(held), **kwargs)
    _kept.extend([] if _kept else [(name, tensor.clone()) for name, tensor in held])
    return load(self, _kept, **kwargs)


def is_wrong() -> bool:
    replica = os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0")
    return os.environ.get("WRONG_REPLICA", replica) == replica


def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate without the adapter."""
    return add(self, *args, **({**kwargs, "lora_request": None} if is_wrong() else kwargs))


load, add = Model.load_weights, LLMEngine.add_request
if KIND == "no adapter":
    LLMEngine.add_request = add_request
elif KIND:
    Model.load_weights = load_weights
