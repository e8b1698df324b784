"""Whether this process has an accelerator: the one question that switches CPU adaptations on."""

from functools import cache


@cache
def has_accelerator() -> bool:
    """True where torch sees a GPU, NPU or the like; False switches on what CPU runs need."""
    import torch

    return bool(torch.accelerator.is_available())
