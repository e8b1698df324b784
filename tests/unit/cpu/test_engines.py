"""vLLM keeps a layer's packed weights on CPU when ms-swift has it processed once more."""

from __future__ import annotations

import pytest
import torch

from swift_grpo_ext.cpu import engines
from swift_grpo_ext.upstream.patches import make
from tests.rig.releases import needs_packed_convolutions


@needs_packed_convolutions
def test_packed_convolutions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift has layers processed once more after each update of weights."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(utils.ops, "causal_conv1d_weight_pack", lambda weight: weight + 100)
    make(engines.keep_packed_convolutions)
    layer = torch.nn.Module()
    for value in (1, 2):
        weight = torch.full((8, 1, 4), value, dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        for _ in range(2):
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            assert layer.weight.tolist() == [[value + 100] * 4] * 8
