"""A worker reports the weights and adapters that it loaded, and an adapter's refusal, until the
next update (M4). In `tests/stack/test_failures.py` workers join real groups, within bounds."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.weights.receiver import VerifiedWeightSyncWorkerExtension
from swift_grpo_ext.weights.update import MERGED, EngineWeights, WeightUpdateError, shapes_of

TENSORS = {"a.base_layer.weight": torch.eye(64), "b": torch.ones(2, dtype=torch.bfloat16)}
BASE = {"a.weight": "float32 (64, 64)", "b": "bfloat16 (2,)"}
ADAPTER = {
    "base_model.model.q.lora_A.weight": torch.arange(6.0).reshape(2, 3),
    "base_model.model.q.lora_B.weight": torch.ones(3, 2),
    "base_model.model.experts.lora_A.weight": torch.ones(2),
    "base_model.model.experts.base_layer.lora_A.weight": torch.zeros(2),
}


class Manager:
    """vLLM's manager of adapters. It refuses all, or has layers for some parts."""

    def __init__(self, fault: str = "", held: Any = ("q", "experts.base_layer")) -> None:
        self.fault = fault
        lora = SimpleNamespace(lora_a=None, lora_b=None, scaling=1.0)
        loras = SimpleNamespace(loras=dict.fromkeys(held, lora))
        modules = {"q": 1, "experts": 1}
        self._adapter_manager = SimpleNamespace(get_adapter=lambda _: loras, modules=modules)

    def add_adapter(self, request: Any) -> bool:
        if self.fault:
            raise ValueError(self.fault)
        for tensor in request.lora_tensors.values():
            tensor *= 4  # as vLLM scales them on CPU where they lie
        return True


class Model(torch.nn.Module):
    """It ignores weights by their first letters."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored = ""
        self.a = torch.nn.ModuleDict({"base_layer": torch.nn.Linear(64, 64, bias=False)})
        self.b = torch.nn.Parameter(TENSORS["b"])
        self.load_state_dict(TENSORS)

    def load_weights(self, weights: Any) -> set[str]:
        taken = {name: tensor for name, tensor in weights if name[0] not in self.ignored}
        self.load_state_dict(taken, strict=False)
        return {*taken}


class Worker:
    """The model runner of a worker, and the record of its updates."""

    def __init__(self, load_format: str = "auto") -> None:
        self.model, self.lora_manager = Model(), Manager()
        self.load_config = SimpleNamespace(load_format=load_format)
        self.model_config: Any = SimpleNamespace(quantization=None, dtype=torch.float32, model="/")
        self.weights = EngineWeights(self)  # type: ignore[arg-type]
        self.weights.begin_watch()

    def load(self, *names: str, ends: bool = True, factor: float = 1.0) -> WeightReport:
        """Load weights in a part of their own; return the report of an update that ends."""
        with self.weights.loading():
            self.model.load_weights((name, factor * TENSORS[name]) for name in names or TENSORS)
        if ends:
            self.weights.end(is_whole=True)
        return self.weights.report() if ends else WeightReport()

    def load_adapter(self, *names: str) -> WeightReport:
        tensors = {name: ADAPTER[name] for name in names or ADAPTER}
        with self.weights.adapter():
            if self.lora_manager is None:
                raise RuntimeError("LoRA is not enabled")
            request = SimpleNamespace(lora_tensors=tensors, lora_int_id=111)
            self.lora_manager.add_adapter(request)
        return self.weights.report()


def test_an_update_is_recorded_until_the_next() -> None:
    """The report is of the whole update, with the parameters that it left as they were."""
    worker = Worker()
    assert EngineWeights(worker).report() == WeightReport()  # type: ignore[arg-type]
    worker.load("a.base_layer.weight", ends=False)
    assert worker.load("b") == worker.weights.report() == WeightReport(BASE, faults=[])
    worker.load("b", ends=False)
    assert list(worker.weights.report().loaded) == ["b"]
    for ignored, unfilled in (("b", ["b"]), ("", []), ("ab", [*BASE])):
        worker.model.ignored = ignored
        report = worker.load()
        assert report.unfilled == unfilled
    assert report.loaded == {}
    # A quantized model has parameters that no update fills.
    worker.model_config.quantization = "fp8"
    assert worker.load() == WeightReport(faults=[])


# --- adapters ---


def test_an_adapter_is_recorded_with_its_base() -> None:
    """After a base, the report has base and adapter; later only the last adapter. A base starts a
    new report."""
    worker, [first, *_] = Worker(), ADAPTER
    for _ in range(2):
        worker.load()
        assert worker.load_adapter(first).loaded == BASE | {first: "float32 (2, 3)"}
        assert worker.load_adapter().loaded == shapes_of(ADAPTER.items())
    assert worker.weights.report().loaded.keys() == ADAPTER.keys()
    # vLLM scales matrices where they lie: in a colocated engine those are the trainer's own.
    assert ADAPTER["base_model.model.q.lora_B.weight"].tolist() == [[1.0, 1.0]] * 3


REFUSALS = [
    (Manager("no"), f"vLLM refuses the adapter: no Give .* plain LoRA, {MERGED}"),
    (Manager(held="qedcba"), rf"5 modules \(a, b, c, d, e\).* others\), {MERGED}"),
    (None, "LoRA is not enabled"),
]


@pytest.mark.parametrize(("manager", "told"), REFUSALS)
@pytest.mark.parametrize("before", ["", "base", "adapter", "unended adapter"])
def test_a_refused_adapter_is_a_fault_until_another_update_comes(
    before: str, manager: Any, told: str
) -> None:
    """It stays one whatever came before and however often the server asks. Some clients do not
    report the end of a base. ms-swift asks only the first of several servers about adapters."""
    worker = Worker()
    if before in ("base", "unended adapter"):
        worker.load(ends=before == "base")
    if "adapter" in before:
        worker.load_adapter()
    worker.lora_manager = manager
    with pytest.raises((WeightUpdateError, RuntimeError), match=told):
        worker.load_adapter()
    for _ in range(2):
        assert re.search(told, worker.weights.report().adapter_fault)
    assert worker.load() == WeightReport(BASE, faults=[])
    worker.lora_manager = Manager()
    assert worker.load_adapter().adapter_fault == ""


def test_a_watch_that_has_ended_finds_nothing_sound() -> None:
    """Its earlier findings are dropped. Random weights are no base."""
    worker = Worker()
    [fault] = worker.load(factor=0.0).faults or ()
    assert fault.endswith("a.base_layer.weight is all zeros")
    worker.weights._watch = SimpleNamespace()  # type: ignore[assignment]
    for _ in range(2):
        assert worker.load() == WeightReport(BASE, faults=None)
        worker.weights.begin_watch()
    assert Worker("dummy").load(factor=0.0).faults == []


# --- what a server's worker adds ---


def test_the_fewest_bits_of_an_engines_numbers_are_told() -> None:
    """They bound the gap between rollout and training."""
    worker: Any = VerifiedWeightSyncWorkerExtension()
    for dtype, quantization, cache, bits in (
        (torch.float32, None, "auto", 32),
        (torch.bfloat16, None, "bfloat16", 16),
        (torch.bfloat16, "bitsandbytes", "auto", 8),
        (torch.float32, None, "fp8_e5m2", 8),
    ):
        worker.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=dtype, quantization=quantization),
            cache_config=SimpleNamespace(cache_dtype=cache),
        )
        assert worker.read_number_bits() == bits
