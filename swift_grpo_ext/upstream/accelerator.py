"""The one question that switches adaptations for CPU on: is there an accelerator?"""

from functools import cache


@cache
def has_accelerator() -> bool:
    """Return whether torch sees a GPU, an NPU or the like."""
    import torch

    return bool(torch.accelerator.is_available())
