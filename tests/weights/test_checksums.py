"""Checksums of weights: whatever is lost or changed on the way is named."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from scripts.bench.measure import peak_bytes
from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.weights import checksums
from swift_grpo_ext.weights.checksums import (
    UNFILLED,
    WORDS_OF_PART,
    WeightUpdateError,
    compare,
    weight_checksums,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool)


def checksum(tensor: torch.Tensor) -> int:
    return int(checksums.checksum(tensor)) & (2**64 - 1)


def defined(tensor: torch.Tensor) -> int:
    """The docstring's formula, word by word."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1000])
def test_the_checksum_is_as_defined(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.randn(numel).mul(10).to(dtype)
    assert checksum(tensor) == defined(tensor)


def test_in_several_parts_with_one_copy_at_most() -> None:
    """None where the memory can be read as words."""
    whole = torch.randn(2, 4 * WORDS_OF_PART + 2)
    offset, transposed = whole.view(-1)[1:-1], whole[:, :-2].T
    for tensor, num_copies in ((whole, 0), (offset, 1), (transposed, 1)):
        num_bytes = tensor.numel() * tensor.element_size()
        limit = num_copies * num_bytes + 3 * 8 * WORDS_OF_PART
        assert checksum(tensor) == defined(tensor)
        assert peak_bytes(partial(checksum, tensor)) < limit


@pytest.mark.parametrize("start", range(14))
def test_wherever_a_tensor_begins_in_its_storage(start: int) -> None:
    tensor = torch.randn(40)[start : start + 26]
    assert checksum(tensor) == defined(tensor)


def test_checksums_name_type_and_shape() -> None:
    weight = torch.zeros(2, 3)
    assert weight_checksums([("w", weight)]) == {"w": "float32 (2, 3) 0000000000000000"}
    assert weight_checksums([]) == {}
    named = ["a.base_layer.weight", "a.base_layer.lora_A.weight"]
    sums = weight_checksums((name, weight) for name in named)
    assert list(sums) == ["a.weight", named[1]]


def test_a_difference_is_named() -> None:
    sent = {f"layer.{i}": str(i) for i in range(9)}
    compare(sent, dict(reversed(sent.items())), "replica 0")
    received = {**sent, "layer.3": "x", "head": "1"}
    del received["layer.7"]
    message = (
        r"^replica 0 does not hold .*: of 9 tensors 1 did not arrive \(layer\.7\); "
        r"1 arrived changed \(layer\.3\); 1 were not sent \(head\)"
    )
    with pytest.raises(WeightUpdateError, match=message):
        compare(sent, received, "replica 0")
    with pytest.raises(WeightUpdateError, match=r"9 did not arrive \(layer\.0, .*4, \.\.\.\)"):
        compare(sent, {}, "replica 0")
    with pytest.raises(WeightUpdateError, match=r"^replica 0 does not generate with .*\. why$"):
        compare(sent, {ADAPTER_FAULT: "why"}, "replica 0")
    with pytest.raises(WeightUpdateError, match=r"2 of its parameters were left as .* \(a, b\)\."):
        compare(sent, {**sent, UNFILLED: "a b"}, "replica 0")
