"""A plugin for tests: engines that accept the trainer's weights and use others.

The environment variable `WRONG_WEIGHTS` is `stale` (the engine loads the weights of the first
update again and again) or `no adapter` (the replica `WRONG_REPLICA` generates without it).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
from vllm.v1.engine.llm_engine import LLMEngine

_first_update: list[tuple[str, torch.Tensor]] = []


def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> Any:
    """Load the checkpoint, then the first update at each update."""
    is_update = hasattr(self, "_has_checkpoint")
    self._has_checkpoint = True
    if not is_update:
        return load(self, weights, **kwargs)
    sent = list(weights)
    _first_update.extend([] if _first_update else [(name, t.clone()) for name, t in sent])
    return load(self, _first_update, **kwargs)


def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate without the adapter."""
    if os.environ.get("SWIFT_ROLLOUT_DP_RANK") == os.environ["WRONG_REPLICA"]:
        kwargs["lora_request"] = None
    return add(self, *args, **kwargs)


load, add = Model.load_weights, LLMEngine.add_request
if os.environ.get("WRONG_WEIGHTS") == "no adapter":
    LLMEngine.add_request = add_request
elif os.environ.get("WRONG_WEIGHTS") == "stale":
    Model.load_weights = load_weights
