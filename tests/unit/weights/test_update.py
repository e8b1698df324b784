"""Reports of engines: tensors that are lost or misshapen are named."""

from __future__ import annotations

import pytest
import torch

from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.weights.update import WeightUpdateError, compare, shapes_of


def test_tensors_are_named_with_type_and_shape() -> None:
    weight = torch.zeros(2, 3, dtype=torch.bfloat16)
    named = ["a.base_layer.weight", "a.base_layer.lora_A.weight"]
    assert shapes_of((name, weight) for name in named) == {
        "a.weight": "bfloat16 (2, 3)",
        "a.base_layer.lora_A.weight": "bfloat16 (2, 3)",
    }


def test_a_difference_is_named() -> None:
    sent = {f"layer.{i}": "float32 (2,)" for i in range(9)}
    compare(sent, WeightReport(dict(reversed(sent.items()))), "replica 0")
    received = {**sent, "layer.3": "float32 (3,)"}
    del received["layer.7"]
    message = (
        r"^replica 0 does not hold .* of 9 tensors: 1 did not arrive \(layer\.7\); "
        r"1 have another type or shape \(layer\.3\)"
    )
    with pytest.raises(WeightUpdateError, match=message):
        compare(sent, WeightReport(received), "replica 0")
    with pytest.raises(WeightUpdateError, match=r"9 did not arrive \(layer\.0, .*4, \.\.\.\)"):
        compare(sent, WeightReport(), "replica 0")
    with pytest.raises(WeightUpdateError, match=r"^replica 0 does not generate with .*\. why$"):
        compare(sent, WeightReport(adapter_fault="why"), "replica 0")
    with pytest.raises(WeightUpdateError, match=r"2 of its parameters were left as .* \(a, b\)\."):
        compare(sent, WeightReport(sent, ["a", "b"]), "replica 0")
