"""The weights that an engine was given must be those of the trainer (docs/promises.md, M4).

Each side takes a checksum of every tensor that it sends or loads, under the name that crosses the
wire. Checksums that differ name the tensors that were lost, or changed on the way.

An engine has to generate with an adapter too that it was given (`--vllm_enable_lora`). Without this
module rollouts come from the base model, or from the adapter before, and nothing fails. A server
logs that vLLM refused an adapter (`--lora_rank 64` where the server allows 16, DoRA), and answers
200 (ms-swift 4.6, pipelines/infer/rollout.py, `llm_worker`). vLLM leaves out what no layer of its
own takes, such as adapters of a vision tower, without a word (vLLM 0.32, lora/model_manager.py,
`activate_adapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.upstream.patches import replaced

if TYPE_CHECKING:
    from swift.rlhf_trainers.utils import TensorLoRARequest
    from vllm.config import ModelConfig

WeightChecksums = dict[str, str]
"""For each tensor's name its type, shape and checksum, as text."""

WORDS_OF_PART = 2**18
"""Words that are multiplied at a time: 2 MiB, which CPUs keep in their cache. On an accelerator 16
times as many: there the number of kernels is what costs."""

MOST_NAMED = 5
MERGED = "--vllm_enable_lora on both sides: adapters are then merged into the engine's weights."
"""Ends a remedy that begins with "leave out"."""

UNFILLED = "swift_grpo_ext.unfilled"
"""Key beside a worker's checksums: parameters that the update has left as they were, in words."""


class WeightUpdateError(RuntimeError):
    """An engine does not hold the weights of the trainer."""


def weight_checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightChecksums:
    """Return the checksums of these tensors, after one synchronization for all of them."""
    labels = []
    sums = []
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        labels.append((name, f"{dtype} {tuple(tensor.shape)}"))
        sums.append(checksum(tensor))
    values = torch.stack([s.to(sums[0].device) for s in sums]).tolist() if sums else []
    pairs = zip(labels, values, strict=True)
    return {
        plain_name(name): f"{label} {value & (2**64 - 1):016x}" for (name, label), value in pairs
    }


def plain_name(name: str) -> str:
    """Return a weight's name without `base_layer`, which says that adapters lie over it: ms-swift
    adds or drops that on the way to an engine which holds adapters apart (`--vllm_enable_lora`). An
    adapter's own name stays, in which it tells two matrices of experts apart."""
    return name if ".lora_" in name else name.replace(".base_layer.", ".")


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number of 64 bits, as an int64 [], that changes with every single bit.

    It is the sum over i of word_i * (2 i + 1), modulo 2^64, over the tensor's bytes as words of 64
    bits, the last filled up with 0. A flipped bit changes a word by a power of two, and an odd
    multiple of 2^k, k < 64, is not 0 modulo 2^64. Words that change places are seen, since their
    factors differ, and random values in a tensor's place but for 1 in 2^64.
    """
    tensor = tensor.detach()
    num_bytes = tensor.numel() * tensor.element_size()
    starts_with_word = tensor.storage_offset() * tensor.element_size() % 8 == 0
    # Views where torch allows them: a copy of an embedding may be gigabytes.
    if tensor.is_contiguous() and starts_with_word and num_bytes % 8 == 0:
        words_W = tensor.view(-1).view(torch.uint8).view(torch.int64)
    else:
        words_W = tensor.new_zeros(-(-num_bytes // 8), dtype=torch.int64)
        copy = words_W.view(torch.uint8)[:num_bytes].view(tensor.dtype)
        copy.view(tensor.shape).copy_(tensor)
    total = words_W.new_zeros(())
    size = WORDS_OF_PART if tensor.device.type == "cpu" else 16 * WORDS_OF_PART
    places_P = torch.arange(min(len(words_W), size), device=words_W.device)
    for number, part_P in enumerate(words_W.split(size)):
        # Integers of torch wrap around, which is arithmetic modulo 2^64. `places_P` is made once:
        # sum (2 i + 1) w_i = sum w_i + 2 (sum place w_i + start sum w_i), with i = start + place.
        sum_of_part = part_P.sum()
        sum_by_place = (part_P * places_P[: len(part_P)]).sum()
        total += sum_of_part + 2 * (sum_by_place + number * size * sum_of_part)
    return total


@dataclass
class Loads:
    """What a vLLM model's `load_weights` has taken in an update."""

    checksums: WeightChecksums = field(default_factory=dict)
    filled: set[str] | None = field(default_factory=set)
    """Names of the model's parameters that it says it filled; None where it does not say."""

    note: Callable[[list[tuple[str, torch.Tensor]]], None] = lambda weights: None
    """Is told of all that has come."""


@contextmanager
def recorded_loads(model: torch.nn.Module, loads: Loads) -> Iterator[None]:
    """Add what `model.load_weights` takes; tensors with which it filled nothing are lost."""
    load = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any) -> Any:
        held = list(weights)  # an iterator is read once
        loads.note(held)
        filled = load(held, *args, **kw)
        # vLLM's loaders return the names that they filled; some models' return None.
        if filled is None or filled:
            loads.checksums |= weight_checksums(held)
        loads.filled = None if filled is None or loads.filled is None else loads.filled | filled
        return filled

    with replaced(model, "load_weights", load_weights):
        yield


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

    def add_adapter(request: TensorLoRARequest) -> bool:
        # Before vLLM scales matrices on CPU where they lie, which in a colocated engine is the
        # trainer's own memory.
        tensors = {
            name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor
            for name, tensor in request.lora_tensors.items()
        }
        sums.update(weight_checksums(tensors.items()))
        request.lora_tensors = tensors
        # The class's own: this function stands in its place on the object.
        try:
            added = bool(type(manager).add_adapter(manager, request))
        except Exception as e:
            raise WeightUpdateError(
                f"vLLM refuses the adapter: {e} Give `swift rollout` a --vllm_max_lora_rank that "
                f"is at least the adapter's rank, train with plain LoRA, or leave out {MERGED}"
            ) from e
        layers = manager._adapter_manager
        held = layers.get_adapter(request.lora_int_id)
        if held is None or request.lora_int_id not in layers.lora_index_to_id:
            raise WeightUpdateError(
                f"vLLM holds no adapter after it was given one. Leave out {MERGED}"
            )
        # `base_layer`: the first of two matrices of experts that lie in one tensor.
        ignored = sorted(
            name for name in held.loras if name.removesuffix(".base_layer") not in layers.modules
        )
        if ignored:
            raise WeightUpdateError(
                "vLLM has no place for parts of the adapter: it ignores those of "
                f"{len(ignored)} modules ({first_names(ignored)}). Train none there (--freeze_vit "
                "true and --freeze_aligner true for the tower of a model that sees, "
                f"--target_modules for others), or leave out {MERGED}"
            )
        return added

    try:
        with replaced(manager, "add_adapter", add_adapter) if manager else nullcontext():
            yield sums
    except Exception as e:
        sums[ADAPTER_FAULT] = str(e)
        raise


def note_unfilled(model: torch.nn.Module, loads: Loads, config: ModelConfig) -> None:
    """Add a model's parameters that an update of all weights has left as they were, as vLLM itself
    looks for them when it loads from disk.

    Args:
        config: vLLM's `ModelConfig`; nothing is added for a quantized model, which has parameters
            of its own.
    """
    if loads.filled is None or getattr(config, "quantization", None) is not None:
        return
    filled = {plain_name(name) for name in loads.filled}
    if left := {plain_name(name) for name, _ in model.named_parameters()} - filled:
        loads.checksums[UNFILLED] = " ".join(sorted(left))


def compare(sent: Mapping[str, str], received: Mapping[str, str], who: str) -> None:
    """Raise `WeightUpdateError`, naming tensors, where an engine received something else.

    Args:
        sent: the trainer's checksums.
        received: the engine's.
        who: names the engine in the error.
    """
    received = dict(received)
    if fault := received.pop(ADAPTER_FAULT, None):
        raise WeightUpdateError(f"{who} does not generate with the trainer's adapter. {fault}")
    faults = {
        "of its parameters were left as they were": received.pop(UNFILLED, "").split(),
        "did not arrive": [name for name in sent if name not in received],
        "arrived changed": [n for n in sent if n in received and sent[n] != received[n]],
        "were not sent": [name for name in received if name not in sent],
    }
    wrong = [
        f"{len(names)} {what} ({first_names(names)})" for what, names in faults.items() if names
    ]
    if wrong:
        raise WeightUpdateError(
            f"{who} does not hold the trainer's weights: of {len(sent)} tensors "
            f"{'; '.join(wrong)}. Rollouts would come from another policy. Its "
            "log tells why; restart it and resume from the last checkpoint."
        )


def first_names(names: Sequence[str]) -> str:
    """Spell the first names of a list that may be long."""
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
