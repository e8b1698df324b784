"""Checksums of weights: whatever is lost or changed on the way is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bench.peak import peak_bytes
from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.weights import checksums
from swift_grpo_ext.weights.checksums import (
    ORDERED_BLOCKS,
    WORDS_OF_BLOCK,
    WeightUpdateError,
    compare,
    compare_tensors,
    recorded_loads,
    weight_checksums,
    weight_checksums_in_background,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool)


def checksum(tensor: torch.Tensor) -> int:
    return int(checksums.checksum(tensor)) & (2**64 - 1)


def defined(tensor: torch.Tensor) -> int:
    """The docstring's formula, word by word."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = 0
    for i, word in enumerate(words):
        block, j = divmod(i, WORDS_OF_BLOCK)
        total += word * (2 * block + 1) * (2 * j + 1 if block % ORDERED_BLOCKS == 0 else 1)
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1000])
def test_the_checksum_is_as_defined(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.randn(numel).mul(10).to(dtype)
    assert checksum(tensor) == defined(tensor)


@pytest.mark.parametrize("num_blocks", [1, ORDERED_BLOCKS - 1, ORDERED_BLOCKS, ORDERED_BLOCKS + 2])
def test_over_several_blocks(num_blocks: int) -> None:
    tensor = torch.randn(2 * num_blocks * WORDS_OF_BLOCK + 5)
    for part in (tensor, tensor[:-5], tensor[1:]):  # the last begins in the middle of a word
        assert checksum(part) == defined(part)


@pytest.mark.parametrize("numel", [2**19, 2**19 + 1])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_is_copied_once_at_most(numel: int, offset: int, transposed: bool) -> None:
    """Not at all where its memory can be read as words."""
    tensor = torch.randn(2 * numel + offset)[offset:].view(2, numel)
    if transposed:
        tensor = tensor.T
    num_bytes = tensor.numel() * tensor.element_size()
    copies = int(transposed or offset > 0)
    assert checksum(tensor) == defined(tensor)
    assert peak_bytes(lambda: checksum(tensor)) < copies * num_bytes + num_bytes // 8


@settings(max_examples=200)
@given(bit=st.integers(0, 8 * 8 * (ORDERED_BLOCKS + 2) * WORDS_OF_BLOCK + 8 * 12 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    before = torch.zeros(8 * (ORDERED_BLOCKS + 2) * WORDS_OF_BLOCK + 12, dtype=torch.uint8)
    after = before.clone()
    after[bit // 8] ^= 1 << (bit % 8)
    assert checksum(after) != checksum(before)


def test_values_that_change_places_are_seen() -> None:
    tensor = torch.arange(2 * (ORDERED_BLOCKS + 2) * WORDS_OF_BLOCK, dtype=torch.float32)
    for shift in (1, 2, 2 * WORDS_OF_BLOCK, 2 * ORDERED_BLOCKS * WORDS_OF_BLOCK):
        assert checksum(tensor.roll(shift)) != checksum(tensor)
    square = torch.randn(512, 512)
    assert checksum(square.T) != checksum(square)


def test_words_that_change_places_within_blocks_are_seen_in_one_of_many() -> None:
    tensor = torch.arange(2 * (ORDERED_BLOCKS + 2) * WORDS_OF_BLOCK, dtype=torch.float32)
    blocks = tensor.view(-1, WORDS_OF_BLOCK, 2)
    for block in range(len(blocks)):
        changed = blocks.clone()
        changed[block] = changed[block].flip(0)
        is_seen = checksum(changed) != checksum(tensor)
        assert is_seen == (block % ORDERED_BLOCKS == 0)
    assert checksum(blocks.flip(1)) != checksum(tensor)


def test_checksums_name_type_and_shape() -> None:
    weight = torch.zeros(2, 3)
    other = weight_checksums([("w", weight.reshape(3, 2))])
    assert weight_checksums([("w", weight)]) == {"w": "float32 (2, 3) 0000000000000000"}
    assert other != weight_checksums([("w", weight)])
    assert weight_checksums([("w", weight.to(torch.bfloat16))]) != weight_checksums([("w", weight)])
    assert weight_checksums([]) == weight_checksums_in_background([])() == {}
    tensors = [("a", torch.randn(1000)), ("b", torch.randn(7))]
    assert weight_checksums_in_background(tensors)() == weight_checksums(tensors)


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


def test_tensors_at_hand_are_compared_by_memory_and_else_by_value() -> None:
    sent = {"a": torch.randn(4, 2), "b": torch.randn(3), "c.base_layer.weight": torch.randn(2)}
    compare_tensors(sent, dict(sent), "the engine")
    loaded = {"a": sent["a"].clone(), "b": sent["b"], "c.weight": sent["c.base_layer.weight"]}
    compare_tensors(sent, loaded, "the engine")
    for name, wrong in {
        "a": loaded["a"] + 1,
        "b": sent["b"].to(torch.float64),
        "c.weight": sent["c.base_layer.weight"].flip(0),
    }.items():
        with pytest.raises(WeightUpdateError, match=rf"of 3 .*1 arrived changed \({name}\)"):
            compare_tensors(sent, {**loaded, name: wrong}, "the engine")
    transposed = sent["a"].view(2, 4)
    with pytest.raises(WeightUpdateError, match=r"1 arrived changed \(a\)"):
        compare_tensors(sent, {**loaded, "a": transposed}, "the engine")
    del loaded["b"]
    with pytest.raises(WeightUpdateError, match=r"1 did not arrive \(b\)"):
        compare_tensors(sent, loaded, "the engine")


def test_only_what_a_model_has_taken_is_noted() -> None:
    class Model:
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
            if any(name == "bad" for name, _ in weights):
                raise ValueError("no such weight")
            return {name for name, _ in weights}

    model, good = Model(), ("good", torch.zeros(1))
    with recorded_loads(model) as taken:
        assert model.load_weights(iter([good])) == {"good"}  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no such"):
            model.load_weights([("bad", torch.zeros(1))])
    assert taken == [good]
    assert "load_weights" not in vars(model)
