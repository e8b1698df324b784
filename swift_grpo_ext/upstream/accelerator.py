"""Detects an accelerator, and the precision of an engine's numbers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@cache
def has_accelerator() -> bool:
    """Return whether torch sees a GPU, an NPU or the like."""
    import torch

    return bool(torch.accelerator.is_available())


def number_bits(config: VllmConfig) -> int:
    """Return the size of an engine's numbers in bits. It is 8 if weights or the KV cache are
    quantized, to 8 bits or fewer."""
    import torch

    cache = config.cache_config.cache_dtype
    # The name of a quantized cache ("fp8") is not a torch dtype.
    has_whole_cache = cache == "auto" or hasattr(torch, cache)
    is_quantized = config.model_config.quantization is not None or not has_whole_cache
    return 8 if is_quantized else 8 * config.model_config.dtype.itemsize
