"""An engine has to generate with the adapter that it was given (`--vllm_enable_lora`).

Without this module rollouts come from the base model, or from the adapter before, and nothing
fails. A server logs that vLLM refused an adapter (`--lora_rank 64` where the server allows 16,
DoRA), and answers 200 (ms-swift 4.6, pipelines/infer/rollout.py, `llm_worker`). vLLM leaves out
what no layer of its own takes, such as adapters of a vision tower, without a word (vLLM 0.32,
lora/model_manager.py, `activate_adapter`). Here what vLLM's manager of adapters is given is
recorded as whole weights are, and what it does not use ends the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.weights.checksums import (
    MOST_NAMED,
    WeightChecksums,
    WeightUpdateError,
    weight_checksums,
)

MERGED = "--vllm_enable_lora on both sides: adapters are then merged into the engine's weights."
"""Ends a remedy that begins with "leave out"."""


@contextmanager
def recorded_adapter(manager: Any) -> Iterator[WeightChecksums]:
    """Record the adapter that a LoRA manager of vLLM is given: its checksums, and under
    `ADAPTER_FAULT` why the engine does not generate with it, in words.

    Args:
        manager: a model runner's `lora_manager`; None where the engine has none.

    Raises:
        WeightUpdateError: the engine does not use it, or not all of it.
    """
    sums: WeightChecksums = {}

    def add_adapter(request: Any) -> bool:
        # Before vLLM scales matrices on CPU where they lie, which in a colocated engine is the
        # trainer's own memory.
        tensors = {
            name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor
            for name, tensor in request.lora_tensors.items()
        }
        sums.update(weight_checksums(tensors.items()))
        request.lora_tensors = tensors
        try:
            added = bool(type(manager).add_adapter(manager, request))
        except Exception as e:
            raise WeightUpdateError(
                f"vLLM refuses the adapter: {e} Give `swift rollout` a --vllm_max_lora_rank that "
                f"is at least the adapter's rank, train with plain LoRA, or leave out {MERGED}"
            ) from e
        if left_out := _left_out(manager, request.lora_int_id):
            raise WeightUpdateError(left_out)
        return added

    if manager is not None:
        manager.add_adapter = add_adapter
    try:
        yield sums
    except Exception as e:
        sums[ADAPTER_FAULT] = str(e)
        raise
    finally:
        if manager is not None:
            del manager.add_adapter


def _left_out(manager: Any, adapter_id: int) -> str:
    """Say which parts of an adapter the engine does not use; "" where it uses all."""
    layers = manager._adapter_manager
    held = layers.get_adapter(adapter_id)
    if held is None or adapter_id not in layers.lora_index_to_id:
        return f"vLLM holds no adapter after it was given one. Leave out {MERGED}"
    # `base_layer`: the first of two matrices of experts that lie in one tensor.
    ignored = sorted(n for n in held.loras if n.removesuffix(".base_layer") not in layers.modules)
    if not ignored:
        return ""
    names = ", ".join(ignored[:MOST_NAMED]) + (", ..." if len(ignored) > MOST_NAMED else "")
    return (
        f"vLLM has no place for parts of the adapter: it ignores those of {len(ignored)} modules "
        f"({names}). Train none there (--freeze_vit true and --freeze_aligner true for the tower "
        f"of a model that sees, --target_modules for others), or leave out {MERGED}"
    )
