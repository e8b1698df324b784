"""A plugin for tests: engines that accept the trainer's weights and use others, once a path exists.

`WRONG_WEIGHTS`, a variable of the environment, is the path. A colocated engine loads its last
weights again; replica 1 of a server generates without its adapter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
from vllm.v1.engine.llm_engine import LLMEngine

_last: dict[str, torch.Tensor] = {}


def is_wrong(replica: str | None) -> bool:
    is_this = os.environ.get("SWIFT_ROLLOUT_DP_RANK") == replica
    return is_this and Path(os.environ["WRONG_WEIGHTS"]).exists()


def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> Any:
    sent = {name: tensor.clone() for name, tensor in weights}
    if is_wrong(None):
        sent = {name: _last[name] for name in sent}
    _last.update(sent)
    return load(self, sent.items(), **kwargs)


def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
    if is_wrong("1"):
        kwargs["lora_request"] = None
    return add(self, *args, **kwargs)


load, add = Model.load_weights, LLMEngine.add_request
Model.load_weights = load_weights
LLMEngine.add_request = add_request
