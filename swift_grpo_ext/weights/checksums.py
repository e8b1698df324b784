"""The weights that an engine was given must be those of the trainer (docs/promises.md, M4).

Each side takes a checksum of every tensor that it sends or loads, under the name that crosses the
wire. Checksums that differ name the tensors that were lost, or changed on the way. Tensors that did
not travel, since both sides hold the same memory, need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from swift_grpo_ext.rollout.wire import ADAPTER_FAULT

if TYPE_CHECKING:
    from vllm.config import ModelConfig

WeightChecksums = dict[str, str]
"""For each tensor's name its type, shape and checksum, as text."""

WORDS_OF_BLOCK = 512
ORDERED_BLOCKS = 64
"""In one of so many blocks the order of words counts."""

MOST_NAMED = 5
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

    sum over words i of word_i * odd_i, modulo 2^64, over the tensor's bytes as 64-bit words, in
    blocks of 4 KiB: odd_i is 2 b + 1 for a word of block b, and (2 b + 1)(2 j + 1) for word j of
    every 64th block, from block 0 on. A flipped bit changes a word by a power of two, and an odd
    multiple of 2^k, k < 64, is not 0 modulo 2^64. Blocks that change places are seen, since their
    factors differ, and so is what moves from block to block, but for 1 in 2^64 of random values.
    Words that change places within a block are seen in every 64th one: with probability 1/64 in a
    single block, surely where all blocks have it. (Factors for all words take 3 times as long.)
    """
    words_W = _words(tensor.detach())
    in_blocks = words_W.numel() // WORDS_OF_BLOCK * WORDS_OF_BLOCK
    blocks_BN = words_W[:in_blocks].view(-1, WORDS_OF_BLOCK)
    rest_1R = words_W[None, in_blocks:]
    is_ordered = len(blocks_BN) % ORDERED_BLOCKS == 0
    rest_sum = rest_1R.sum(1) + (_order_sums(rest_1R) if is_ordered else 0)
    sums_B = torch.cat([blocks_BN.sum(1), rest_sum])
    sums_B[: in_blocks // WORDS_OF_BLOCK : ORDERED_BLOCKS] += _order_sums(
        blocks_BN[::ORDERED_BLOCKS]
    )
    return (sums_B * (_even_numbers(len(sums_B), sums_B.device) + 1)).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as int64 [W], the last filled up with 0: its own memory where that
    begins and ends with a word, else one copy."""
    num_bytes = tensor.numel() * tensor.element_size()
    offset = tensor.storage_offset() * tensor.element_size()
    if tensor.is_contiguous() and offset % 8 == 0 and num_bytes % 8 == 0:
        return tensor.view(-1).view(torch.uint8).view(torch.int64)
    words_W = tensor.new_zeros(-(-num_bytes // 8), dtype=torch.int64)
    copy = words_W.view(torch.uint8)[:num_bytes].view(tensor.dtype)
    copy.view(tensor.shape).copy_(tensor)
    return words_W


def _order_sums(blocks_BN: torch.Tensor) -> torch.Tensor:
    """Return sum over j of word_j * 2 j, [B]."""
    return (blocks_BN * _even_numbers(blocks_BN.shape[1], blocks_BN.device)).sum(1)


@cache
def _even_numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device, dtype=torch.int64) * 2


def weight_checksums_in_background(
    tensors: Sequence[tuple[str, torch.Tensor]],
) -> Callable[[], WeightChecksums]:
    """Begin checksums of tensors that stay as they are; the value waits for them.

    On CPU another thread takes it, beside the sending or loading that it verifies. On an
    accelerator the same stream would have to do both: there it is taken at the end.
    """
    if any(tensor.device.type != "cpu" for _, tensor in tensors):
        return lambda: weight_checksums(tensors)
    pool = ThreadPoolExecutor(1)
    pending = pool.submit(weight_checksums, tensors)
    pool.shutdown(wait=False)
    return pending.result


class Loads(list[tuple[str, torch.Tensor]]):
    """The tensors that a vLLM model's `load_weights` was given and has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: set[str] | None = set()
        """Names of the model's parameters that it says it filled; None where it does not say."""


@contextmanager
def recorded_loads(model: torch.nn.Module) -> Iterator[Loads]:
    """Record what `model.load_weights` takes; tensors with which it filled nothing are lost."""
    load, had_own = model.load_weights, "load_weights" in vars(model)
    loads = Loads()

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any) -> Any:
        held = list(weights)
        filled = load(held, *args, **kw)
        if filled is None or filled:
            loads.extend(held)
        loads.filled = None if filled is None or loads.filled is None else loads.filled | filled
        return filled

    model.load_weights = load_weights
    try:
        yield loads
    finally:
        if had_own:
            model.load_weights = load
        else:
            del model.load_weights


def unfilled(model: torch.nn.Module, filled: set[str] | None, config: ModelConfig) -> list[str]:
    """Return a model's parameters that an update of all weights has left as they were, as vLLM
    itself looks for them when it loads from disk.

    Args:
        filled: see `Loads`; [] where the model does not say.
        config: vLLM's `ModelConfig`; [] for a quantized model, which has parameters of its own.
    """
    if filled is None or getattr(config, "quantization", None) is not None:
        return []
    filled = {plain_name(name) for name in filled}
    return sorted({plain_name(name) for name, _ in model.named_parameters()} - filled)


def compare_tensors(
    sent: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], who: str
) -> None:
    """Compare tensors of which both sides are at hand: only what is not the same memory is read.

    Raises:
        WeightUpdateError: the engine was given something else; names tensors.
    """

    def place(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    sent, loaded = ({plain_name(n): t for n, t in side.items()} for side in (sent, loaded))
    shared = {name for name in sent if name in loaded and place(sent[name]) == place(loaded[name])}
    same = dict.fromkeys(shared, "the same memory")
    compare(
        same | weight_checksums((n, t) for n, t in sent.items() if n not in shared),
        same | weight_checksums((n, t) for n, t in loaded.items() if n not in shared),
        who,
    )


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
        f"{len(names)} {what} ({', '.join(names[:MOST_NAMED])}"
        + (", ...)" if len(names) > MOST_NAMED else ")")
        for what, names in faults.items()
        if names
    ]
    if wrong:
        raise WeightUpdateError(
            f"{who} does not hold the trainer's weights: of {len(sent)} tensors "
            f"{'; '.join(wrong)}. Rollouts would come from another policy. Its "
            "log tells why; start it anew and resume from the last checkpoint."
        )
