"""Whether the weights that an engine was given are those of the trainer (SPEC M4).

Each side takes a checksum of every tensor that it sends or loads, under the name that crosses the
wire: a receipt. Receipts that differ name the tensors that were lost, or changed on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Receipt = dict[str, str]
"""For each tensor's name its type, shape and checksum, as text."""

WORDS_OF_BLOCK = 2**16
BLOCKS_AT_A_TIME = 16  # 8 MiB of temporary memory on an accelerator
MOST_NAMED = 5


class WeightUpdateError(RuntimeError):
    """An engine does not hold the weights of the trainer."""


def receipt(tensors: Iterable[tuple[str, torch.Tensor]]) -> Receipt:
    """What is known of these tensors once they are gone; one synchronization for all of them."""
    labels = []
    sums = []
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        labels.append((name, f"{dtype} {tuple(tensor.shape)}"))
        sums.append(_checksum(tensor))
    values = torch.stack([s.to(sums[0].device) for s in sums]).tolist() if sums else []
    pairs = zip(labels, values, strict=True)
    return {name: f"{label} {value & (2**64 - 1):016x}" for (name, label), value in pairs}


def checksum(tensor: torch.Tensor) -> int:
    """A number of 64 bits that no change of a single bit leaves as it is.

    sum over words i of word_i * odd_i, modulo 2^64, over the tensor's bytes as 64-bit words, in
    blocks: odd_i is (2 b + 1)(2 j + 1) for word j of block b. A flipped bit changes a word by a
    power of two, and an odd multiple of 2^k, k < 64, is not 0 modulo 2^64. Words that change places
    within a block, and blocks that do, are seen too: their factors differ.
    """
    return int(_checksum(tensor).item()) & (2**64 - 1)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    flat_B = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat_B.numel() // 8 * 8
    if flat_B.storage_offset() % 8 or flat_B.numel() != whole:
        flat_B = torch.cat([flat_B, flat_B.new_zeros(-flat_B.numel() % 8)]).clone()
    words_W = flat_B.view(torch.int64)
    factors_N = _odd_numbers(WORDS_OF_BLOCK, words_W.device)
    in_blocks = words_W.numel() // WORDS_OF_BLOCK * WORDS_OF_BLOCK
    blocks_BN = words_W[:in_blocks].view(-1, WORDS_OF_BLOCK)
    rest_R = words_W[in_blocks:]
    sums = [*_block_sums(blocks_BN, factors_N), (rest_R * factors_N[: rest_R.numel()]).sum()]
    sums_B = torch.stack(sums)
    return (sums_B * _odd_numbers(len(sums), sums_B.device)).sum()


def _block_sums(blocks_BN: torch.Tensor, factors_N: torch.Tensor) -> Iterable[torch.Tensor]:
    if blocks_BN.device.type == "cpu":
        # Without a product in memory: twice as fast; there is no such kernel for CUDA.
        yield from (torch.dot(block_N, factors_N) for block_N in blocks_BN)
        return
    for some_BN in blocks_BN.split(BLOCKS_AT_A_TIME):
        yield from (some_BN * factors_N).sum(1)


@cache
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device, dtype=torch.int64) * 2 + 1


@contextmanager
def noted_loads(model: Any, loaded: Receipt) -> Iterator[None]:
    """Put what a vLLM model's `load_weights` is given into `loaded`, once it has taken it."""
    load = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any) -> Any:
        held = list(weights)
        new = receipt(held)
        result = load(held, *args, **kw)
        loaded.update(new)
        return result

    model.load_weights = load_weights
    try:
        yield
    finally:
        del model.load_weights


def compare(sent: Mapping[str, str], received: Mapping[str, str], who: str) -> None:
    """Raise `WeightUpdateError`, naming tensors, where an engine received something else.

    Args:
        sent: the trainer's receipt.
        received: the engine's.
        who: names the engine in the error.
    """
    lost = [name for name in sent if name not in received]
    unknown = [name for name in received if name not in sent]
    changed = [name for name in sent if name in received and sent[name] != received[name]]
    wrong = [
        f"{len(names)} {what} ({', '.join(names[:MOST_NAMED])}"
        + (", ...)" if len(names) > MOST_NAMED else ")")
        for what, names in (
            ("did not arrive", lost),
            ("arrived changed", changed),
            ("were not sent", unknown),
        )
        if names
    ]
    if wrong:
        raise WeightUpdateError(
            f"{who} does not hold the trainer's weights: of {len(sent)} tensors "
            f"{'; '.join(wrong)}. Rollouts would come from another policy. Its "
            "log tells why; start it anew and resume from the last checkpoint."
        )
