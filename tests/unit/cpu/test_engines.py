"""Patches of vLLM's engines without an accelerator have their effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.cpu import engines
from swift_grpo_ext.upstream.patches import make
from tests.rig.releases import needs_packed_convolutions


def test_shared_memory_has_a_name_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make(engines.name_shared_memory_by_run)
    monkeypatch.setenv("VLLM_DIST_IDENT", "//")  # vLLM's value for `env://`
    ranks: Any = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    names = []
    for port in ("29500", "29501", "29500"):
        monkeypatch.setenv("MASTER_PORT", port)
        names.append(_CPUSHMDistributed.make_group_name(ranks))
    assert names[0] != names[1]
    assert names[0] == names[2]


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
