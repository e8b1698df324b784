"""Checksums of weights: those that plain arithmetic gives, and their speed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scripts.bench.measure import medians, side_by_side
from scripts.gpu.compare import equal
from scripts.gpu.found import Found
from swift_grpo_ext.weights.checksums import WORDS_OF_PART, checksum, weight_checksums

MASK = 2**64 - 1


def run(device: str) -> Found:
    """Compare checksums on the device with those of numpy on the host."""
    torch.manual_seed(0)
    words = 16 * WORDS_OF_PART + 5  # more than are multiplied at a time
    tensors = {
        "float32": torch.randn(3, 1001),
        "bfloat16, odd": torch.randn(1, 77, dtype=torch.bfloat16),
        "float8": torch.randn(1000).to(torch.float8_e4m3fn),
        "transposed": torch.randn(64, 33).T,
        "off by a word's half": torch.randn(4097)[1:],
        "several parts": torch.randint(-(2**62), 2**62, (words,)),
        "a number": torch.tensor(3.0),
        "nothing": torch.empty(0, 8),
    }
    found = Found()
    for name, tensor in tensors.items():
        ours = int(checksum(on_device(tensor, device))) & MASK
        found.comparisons.append(equal(name, ours, by_numpy(tensor)))
    bits = on_device(tensors["float32"], device).view(torch.int32)
    before = int(checksum(bits))
    bits[2, 999] ^= 1 << 30
    found.comparisons.append(equal("a flipped bit is seen", int(checksum(bits)) != before, True))
    return found


def on_device(tensor: Tensor, device: str) -> Tensor:
    """Return a copy on the device that lies in its memory as the tensor lies in the host's."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    copy = whole.to(device, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def by_numpy(tensor: Tensor) -> int:
    """Return the sum over i of word_i * (2 i + 1), modulo 2^64, over the tensor's bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype=np.uint64)
    return int((words * (2 * np.arange(len(words), dtype=np.uint64) + 1)).sum(dtype=np.uint64))


def run_bandwidth(device: str, megabytes: int) -> Found:
    """Measure the bytes that checksums read each second, beside those that a copy moves."""
    num_tensors = 8
    shape = (megabytes * 2**20 // num_tensors // 8192, 4096)
    tensors = {f"w{n}": torch.randn(shape, device=device).bfloat16() for n in range(num_tensors)}
    target = torch.empty_like(tensors["w0"])

    def copy() -> None:
        for tensor in tensors.values():
            target.copy_(tensor)

    ways = {"a copy": copy, "checksums": lambda: weight_checksums(tensors.items())}
    measures = medians(side_by_side(ways, repetitions=5, device=device))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    # A copy reads and writes.
    speeds = {name: num_bytes / m["seconds"] * 1e-9 for name, m in measures.items()}
    speeds["a copy"] *= 2
    return Found(
        rows=[
            {
                "way": name,
                "GB": num_bytes / 1e9,
                "ms": measures[name]["seconds"] * 1e3,
                "GB/s": speed,
                "of the copy's": speed / speeds["a copy"],
                "peak beyond the weights, MB": measures[name]["peak_bytes"] / 1e6,
            }
            for name, speed in speeds.items()
        ]
    )
