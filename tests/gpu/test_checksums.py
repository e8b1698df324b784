"""Checksums of weights on the device are those that plain arithmetic gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from swift_grpo_ext.weights.checksums import WORDS_OF_PART, checksum

MASK = 2**64 - 1


def on_device(tensor: Tensor, device: str) -> Tensor:
    """A copy on the device that lies in its memory as the tensor lies in the host's."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    copy = whole.to(device, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def by_numpy(tensor: Tensor) -> int:
    """The sum over i of word_i * (2 i + 1), modulo 2^64, over the tensor's bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype=np.uint64)
    return int((words * (2 * np.arange(len(words), dtype=np.uint64) + 1)).sum(dtype=np.uint64))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 1001),
        torch.randn(1, 77, dtype=torch.bfloat16),
        torch.randn(1000).to(torch.float8_e4m3fn),
        torch.randn(64, 33).T,
        torch.randn(4097)[1:],  # off by a word's half
        # More than are multiplied at a time.
        torch.randint(-(2**62), 2**62, (16 * WORDS_OF_PART + 5,)),
        torch.tensor(3.0),
        torch.empty(0, 8),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_by_arithmetic(tensor: Tensor, device: str) -> None:
    assert int(checksum(on_device(tensor, device))) & MASK == by_numpy(tensor)


def test_a_flipped_bit_is_seen(device: str) -> None:
    bits = torch.randn(3, 1001, device=device).view(torch.int32)
    before = int(checksum(bits))
    bits[2, 999] ^= 1 << 30
    assert int(checksum(bits)) != before
