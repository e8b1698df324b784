"""Converts weights to the checkpoint layout that vLLM loads.

Symptom: Qwen3-VL-MoE dies at the first weight update with a bare `AssertionError`; if twice the
experts' width is the hidden size, it silently gets wrong weights. AdaLoRA, and models with a bias
in their router such as GLM-4.5V, fail there too. Can go when ms-swift sends a checkpoint's tensors.
"""

from __future__ import annotations

import re

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from swift_grpo_ext.logits.shim import base_model

StateDict = dict[str, torch.Tensor]


def checkpoint_layout(model: nn.Module, state_dict: StateDict) -> StateDict:
    """Return a model's tensors in the layout of its checkpoint; the model may be wrapped."""
    # AdaLoRA's `ranknum` lacks the prefix by which ms-swift filters adapters (4.6.0,
    # `rollout_mixin.py::_process_state_dict_for_vllm`).
    state_dict = {name: t for name, t in state_dict.items() if ".ranknum." not in name}
    base = base_model(model)
    if not isinstance(base, transformers.PreTrainedModel):
        return state_dict
    conversions = getattr(base, "_weight_conversions", None)  # set by `from_pretrained`
    if conversions is None:
        conversions = get_model_conversion_mapping(base)
    transposed = dict(state_dict)
    for conversion in conversions or ():
        # Other conversions merge or split tensors; vLLM accepts the runtime layout for those.
        if not isinstance(conversion, WeightConverter) or len(conversion.operations) != 1:
            continue
        [operation] = conversion.operations
        # transformers (5.19, `conversion_mapping.py`) transposes the experts of a checkpoint, and
        # so does vLLM when it loads. ms-swift (4.6.0, `rlhf_trainers/utils.py`,
        # `revert_runtime_names_to_checkpoint`) only reverts names. Transposed tensors are views:
        # copies of a 30B model's experts would take 57 GB.
        if isinstance(operation, Transpose):
            for pattern in map(re.compile, conversion.source_patterns):
                for name in filter(pattern.search, state_dict):
                    tensor = state_dict[name]
                    transposed[name] = tensor.transpose(operation.dim0, operation.dim1)
    return transposed


def checkpoint_buffers(model: nn.Module) -> StateDict:
    """Return the tensors of a model's checkpoint that are not parameters, by checkpoint name."""
    from swift.rlhf_trainers.utils import revert_runtime_names_to_checkpoint

    base = base_model(model)
    # A router's bias is a buffer in transformers and a parameter in vLLM, and ms-swift (4.6.0,
    # `rollout_mixin.py::_collect_state_dict_for_vllm`) only sends parameters. GPTQ and AWQ pack a
    # layer into buffers too, which training does not change.
    if getattr(base, "is_quantized", False):
        return {}
    modules = dict(base.named_modules())
    adapters = tuple(f"{path}." for path, m in modules.items() if isinstance(m, BaseTunerLayer))
    buffers = {}
    for path, module in modules.items():
        if f"{path}.".startswith(adapters) and ".base_layer" not in path:
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{path}.{name}".replace(".base_layer", "").lstrip(".")] = buffer
    reverted: StateDict = revert_runtime_names_to_checkpoint(base, buffers)
    return reverted
