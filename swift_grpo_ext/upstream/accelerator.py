"""What models compute on, and with: is there an accelerator, and how long are numbers?"""

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
    """Return the size in bits of an engine's numbers; 8 where weights, or keys and values, are
    quantized, to 8 bits or fewer."""
    import torch

    cache = config.cache_config.cache_dtype
    # torch has no dtype of the name of a quantized cache ("fp8").
    has_whole_cache = cache == "auto" or hasattr(torch, cache)
    is_quantized = config.model_config.quantization is not None or not has_whole_cache
    return 8 if is_quantized else 8 * config.model_config.dtype.itemsize
