"""Adapters that lie apart from an engine's weights: recorded, and refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension

from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.weights.adapters import MERGED
from swift_grpo_ext.weights.checksums import WeightUpdateError, weight_checksums
from swift_grpo_ext.weights.receiver import VerifiedWeightSyncWorkerExtension

ADAPTER = {
    "base_model.model.q.lora_A.weight": torch.arange(6.0).reshape(2, 3),
    "base_model.model.q.lora_B.weight": torch.ones(3, 2),
    "base_model.model.experts.lora_A.weight": torch.ones(2),
    "base_model.model.experts.base_layer.lora_A.weight": torch.zeros(2),
}


class Manager:
    """vLLM's manager of adapters, which refuses all, or has layers for some of its parts."""

    def __init__(
        self, fault: str = "", held: tuple[str, ...] = ("q", "experts.base_layer")
    ) -> None:
        self.fault = fault
        loras = SimpleNamespace(loras=dict.fromkeys(held)) if held else None
        self._adapter_manager = SimpleNamespace(
            get_adapter=lambda _: loras,
            lora_index_to_id=[111],
            modules={"q": 1, "experts": 1},
        )

    def add_adapter(self, request: Any) -> bool:
        if self.fault:
            raise ValueError(self.fault)
        return True


class Worker(VerifiedWeightSyncWorkerExtension):
    def __init__(self, *, manager: Manager | None) -> None:
        model = SimpleNamespace(
            load_weights=lambda weights: {n for n, _ in weights}, named_parameters=list
        )
        self.model_runner = SimpleNamespace(model=model)
        if manager is not None:
            self.model_runner.lora_manager = manager

    def add_lora(self, request: Any) -> bool:
        if not hasattr(self.model_runner, "lora_manager"):
            raise RuntimeError("LoRA is not enabled")
        return bool(self.model_runner.lora_manager.add_adapter(request))


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    """ms-swift's extension without a network: `ADAPTER` comes, or those of its tensors that are
    named; a base of one tensor before it."""

    def update_adapter_flattened_param(self: Any, config: Any, metadatas: list[str]) -> None:
        tensors = {name: ADAPTER[name].clone() for name in metadatas or ADAPTER}
        self.add_lora(SimpleNamespace(lora_tensors=tensors, lora_int_id=111, peft_config={"r": 8}))

    def update_flattened_params(self: Any, metadatas: Any) -> None:
        self.model_runner.model.load_weights([("w", torch.ones(1))])

    for name, function in {
        "update_adapter_flattened_param": update_adapter_flattened_param,
        "update_adapter_param": update_adapter_flattened_param,
        "update_flattened_params": update_flattened_params,
        "process_weights_after_loading": lambda self: None,
    }.items():
        monkeypatch.setattr(WeightSyncWorkerExtension, name, function)
    monkeypatch.setattr(rollout, "_set_death_signal", lambda: None)
    return lambda manager: Worker(manager=manager)


@pytest.mark.parametrize("method", ["update_adapter_flattened_param", "update_adapter_param"])
def test_an_adapter_is_recorded_with_the_update_that_it_is_of(
    method: str, make_worker: Callable[..., Worker]
) -> None:
    """After a base: both. Alone: only what came last. A base begins anew."""
    worker = make_worker(Manager())
    whole, first = weight_checksums(ADAPTER.items()), list(ADAPTER)[:1]
    assert len(whole) == len(ADAPTER)
    base = weight_checksums([("w", torch.ones(1))])
    for _ in range(2):
        worker.update_flattened_params([])
        worker.process_weights_after_loading()
        getattr(worker, method)({}, first)
        assert worker.read_weight_checksums() == base | {first[0]: whole[first[0]]}
        getattr(worker, method)({}, [])
        assert worker.read_weight_checksums() == whole
        getattr(worker, method)({}, first)
        assert worker.read_weight_checksums() == {first[0]: whole[first[0]]}


@pytest.mark.parametrize(
    ("manager", "told"),
    [
        (Manager("no"), f"vLLM refuses the adapter: no Give .* plain LoRA, or leave out {MERGED}"),
        (Manager(held=()), f"holds no adapter after it was given one. Leave out {MERGED}"),
        (Manager(held=("q", "b", "a")), rf"ignores those of 2 modules \(a, b\).* out {MERGED}"),
        (Manager(held=tuple("abcdef")), r"6 modules \(a, b, c, d, e, \.\.\.\)"),
        (None, "LoRA is not enabled"),
    ],
)
def test_a_worker_tells_of_a_refusal_until_another_comes(
    manager: Manager | None, told: str, make_worker: Callable[..., Worker]
) -> None:
    """An engine that has adapters switched off is one of several servers, of which ms-swift asks
    the first."""
    worker = make_worker(manager)
    with pytest.raises((WeightUpdateError, RuntimeError), match=told):
        worker.update_adapter_flattened_param({}, [])
    assert re.search(told, worker.read_weight_checksums()[ADAPTER_FAULT])
    worker.model_runner.lora_manager = Manager()
    worker.update_adapter_flattened_param({}, [])
    assert worker.read_weight_checksums() == weight_checksums(ADAPTER.items())
