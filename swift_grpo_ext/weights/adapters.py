"""Whether an engine draws with the adapter that it was given (`--vllm_enable_lora`; SPEC M4).

Symptom: rollouts come from the base model, or from the adapter before, and nothing fails. A server
logs that vLLM refused an adapter (`--lora_rank 64` where the server allows 16, DoRA), and answers
200. vLLM leaves out what no layer of its own takes (adapters of a vision tower) without a word.
Upstream: ms-swift 4.6, pipelines/infer/rollout.py (`llm_worker`); vLLM 0.32, lora/model_manager.py
(`activate_adapter`).
Here: what vLLM's manager of adapters is given is recorded as whole weights are, and what it does
with it ends the update.
Can go when ms-swift verifies its updates, and vLLM refuses what it does not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.weights.checksums import (
    MOST_NAMED,
    WeightChecksums,
    WeightUpdateError,
    weight_checksums,
)

MERGED = "--vllm_enable_lora on both sides: adapters are then merged into the engine's weights."


@contextmanager
def recorded_adapter(manager: Any) -> Iterator[WeightChecksums]:
    """Record the adapter that a LoRA manager of vLLM is given: its checksums, and under
    `ADAPTER_FAULT` why the engine does not draw with it, in words.

    Args:
        manager: a model runner's `lora_manager`; None where the engine has none.

    Raises:
        WeightUpdateError: the engine does not draw with it, or not with all of it.
    """
    sums: WeightChecksums = {}

    def add_adapter(request: Any) -> bool:
        # Before vLLM scales matrices on CPU where they lie, which in a colocated engine is the
        # trainer's own memory.
        tensors = {name: _own(tensor) for name, tensor in request.lora_tensors.items()}
        sums.update(weight_checksums(tensors.items()))
        request.lora_tensors = tensors
        try:
            added = bool(type(manager).add_adapter(manager, request))
        except Exception as e:
            remedy = _remedy(request.peft_config, manager.lora_config.max_lora_rank)
            raise WeightUpdateError(f"vLLM refuses the adapter: {e} {remedy}") from e
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


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor


def _left_out(manager: Any, adapter_id: int) -> str:
    """What of an adapter the engine does not use, in words; "" where it uses all."""
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


def _remedy(config: Mapping[str, Any], most: int) -> str:
    """What to change for an adapter that an engine refuses.

    Args:
        config: of PEFT.
        most: the rank that the engine allows.
    """
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > most:
        return (
            f"Give --vllm_max_lora_rank {rank} to `swift rollout`, or train with --lora_rank {most}"
            " or less."
        )
    asked = {
        "use_dora": config.get("use_dora"),
        "modules_to_save": config.get("modules_to_save"),
        "lora_bias": config.get("bias", "none") != "none",
    }
    settings = [f"--{name}" for name, is_asked in asked.items() if is_asked]
    return f"Leave out {' and '.join(settings)}{', or ' if settings else ''}{MERGED}"
