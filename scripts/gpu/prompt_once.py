"""A prompt that its samples share, read once, against the plain pass."""

from __future__ import annotations

from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from scripts.gpu.compare import Pass, compare
from scripts.gpu.found import Found
from scripts.gpu.models import Batch, made, why_missing
from scripts.gpu.plan import FLASH
from swift_grpo_ext.logits.shared_prompt import PackedBatch, pack, reason_against
from swift_grpo_ext.logits.shim import LogitsShim


def run(device: str, model: str, attention: str, dtype: str, checkpointing: str = "") -> Found:
    """Compare a tiny model's log-probabilities.

    Args:
        device: "cpu" or "cuda".
        model: its name.
        attention: transformers' name of its implementation.
        dtype: of its weights.
        checkpointing: of its layers: "reentrant", "not reentrant", or none.
    """
    if reason := why_not_installed(attention) or why_missing(model):
        return Found(not_tried=reason)

    def make(is_exact: bool) -> tuple[Any, Batch]:
        made_model, batch = made(model, device, dtype, is_exact)
        if not is_exact:  # flash attention takes no float32
            made_model.set_attn_implementation(attention)
        if checkpointing:
            made_model.enable_input_require_grads()
            made_model.gradient_checkpointing_enable(
                {"use_reentrant": checkpointing == "reentrant"}
            )
        return made_model, batch

    try:
        asked, batch = make(False)
    except (ImportError, ValueError) as e:
        return Found(not_tried=f"transformers: {e}")
    if reason := reason_against(asked, batch.inputs):
        return Found(not_tried=f"left alone: {reason}")
    ways: dict[str, Pass] = {"once": once, "once, in chunks of 3": partial(once, chunk_size=3)}
    return Found(compare(make, plain, ways))


def why_not_installed(attention: str) -> str:
    """Return why an attention cannot be tried; '' where it can."""
    package = FLASH.get(attention, "torch")
    try:
        version(package)
    except PackageNotFoundError:
        return f"{package} is not installed"
    return ""


def packed(model: Any, batch: Batch) -> PackedBatch:
    """Return a batch in which each group's prompt stands once."""
    found = pack(batch.inputs, batch.predicts_BT, model)
    assert found is not None
    return found


def plain(model: Any, batch: Batch, chunk_size: int = 0) -> Tensor:
    """Return log-probabilities [N] of the batch as it is."""
    return logps(model, batch, PackedBatch(batch.inputs, batch.predicts_BT), chunk_size)


def once(model: Any, batch: Batch, chunk_size: int = 0) -> Tensor:
    """Return log-probabilities [N] of the batch with each prompt once."""
    return logps(model, batch, packed(model, batch), chunk_size)


def logps(model: Any, batch: Batch, given: PackedBatch, chunk_size: int) -> Tensor:
    """Return log-probabilities [N] of a batch of either form."""
    return shim_of(model).logps(model, *given, batch.targets_N, chunk_size=chunk_size).logps_N


@lru_cache(maxsize=1)
def shim_of(model: Any) -> LogitsShim:
    """Return the model's shim, which learns of the model at its first forward."""
    return LogitsShim(model, strict=True)
