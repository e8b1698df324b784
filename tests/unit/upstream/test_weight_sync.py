"""Waits for the weights' group are bounded, but for NCCL's, which are logged [F2]. A call reaches
all replicas. Merged adapters keep DDP's hooks [R2]. `tests/stack/test_failures.py` stops real
processes."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from swift.rlhf_trainers.utils import patch_lora_merge, patch_lora_unmerge
from torch import nn

from swift_grpo_ext.upstream import vllm_repairs, weight_sync


def test_a_broadcast_of_nccl_that_waits_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator of NCCL is left alone, since no GPU has run this; gloo's group gets its
    bound."""
    told = threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        told.set()

    monkeypatch.setattr(weight_sync.logger, "error", log)
    of_nccl, of_gloo = SimpleNamespace(disabled=False), SimpleNamespace(group=SimpleNamespace())
    with weight_sync.bounded_broadcasts([of_nccl], 0.05):
        assert told.wait(20)
    [line] = lines
    assert "Weights were not taken within 0.05 s (--rollout_timeout)" in line
    assert vars(of_nccl) == {"disabled": False}
    with weight_sync.bounded_broadcasts([of_gloo, of_nccl], 20.0):
        pass
    with weight_sync.bounded_broadcasts([of_gloo], 0.0):
        pass
    assert (of_gloo.group.timeout, len(lines)) == (0.0, 1)


class AsyncLLM(SimpleNamespace):
    """vLLM's engine, by its name."""


def test_a_call_is_answered_for_all_replicas() -> None:
    async def call(*args: Any, engine: str) -> list[Any]:
        return [engine, args]

    core = SimpleNamespace(core_engines=["a", "b"], _call_utility_async=call)
    engine: Any = AsyncLLM(engine_core=core, collective_rpc=None)
    vllm_repairs.collect_rpc_from_all_replicas(engine)
    call_1, call_2 = ("collective_rpc", "load", 2.0, (1,), {"k": 3}), ("load", None, (), None)
    assert asyncio.run(engine.collective_rpc(*call_1[1:])) == ["a", call_1, "b", call_1]
    assert asyncio.run(engine.collective_rpc("load"))[1] == ("collective_rpc", *call_2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.ones(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.down[0]


def test_merged_adapters_keep_their_type_and_ddps_hooks() -> None:
    """DDP has its hooks at the gradient accumulators, as here. ms-swift alone would lose them."""
    layers = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), Experts()).bfloat16()
    model = get_peft_model(
        layers, LoraConfig(target_modules=["0", "1"], target_parameters=["2.down"])
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    averaged, kept = list[int](), []
    for number, parameter in enumerate(trained):
        [(accumulator, _)] = parameter.view_as(parameter).grad_fn.next_functions
        accumulator.register_hook(lambda *_, number=number: averaged.append(number))
        kept.append(accumulator)
    with weight_sync.adapters_keep_their_type():
        with patch_lora_merge(model):
            model.merge_adapter()
        with patch_lora_unmerge(model):
            model.unmerge_adapter()
    assert {p.dtype for p in trained} == {torch.float32}
    model(torch.arange(5)).float().sum().backward()
    assert sorted(averaged) == [*range(len(trained))]
