"""A worker of a server reports the weights and adapters that it loaded, and an adapter's refusal,
until the next update (M4)."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension

from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.weights.receiver import REPLICA_NUMBER, VerifiedWeightSyncWorkerExtension
from swift_grpo_ext.weights.update import MERGED, WeightUpdateError, shapes_of

TENSORS = {"a.base_layer.weight": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
BASE = {"a.weight": "float32 (3,)", "b": "bfloat16 (2,)"}
ADAPTER = {
    "base_model.model.q.lora_A.weight": torch.arange(6.0).reshape(2, 3),
    "base_model.model.q.lora_B.weight": torch.ones(3, 2),
    "base_model.model.experts.lora_A.weight": torch.ones(2),
    "base_model.model.experts.base_layer.lora_A.weight": torch.zeros(2),
}


class Model:
    def __init__(self) -> None:
        self.ignored: set[str] = set()

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights if name[0] not in self.ignored}

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(TENSORS.items())


class Manager:
    """vLLM's manager of adapters. It refuses all, or has layers for some parts."""

    def __init__(self, fault: str = "", held: Any = ("q", "experts.base_layer")) -> None:
        self.fault = fault
        loras = SimpleNamespace(loras=dict.fromkeys(held))
        modules = {"q": 1, "experts": 1}
        self._adapter_manager = SimpleNamespace(get_adapter=lambda _: loras, modules=modules)

    def add_adapter(self, request: Any) -> bool:
        if self.fault:
            raise ValueError(self.fault)
        for tensor in request.lora_tensors.values():
            tensor *= 4  # as vLLM scales them on CPU where they lie
        return True


class Worker(VerifiedWeightSyncWorkerExtension):
    def __init__(self) -> None:
        config = SimpleNamespace(quantization=None)
        self.model_runner = SimpleNamespace(model=Model(), model_config=config)

    def report(self) -> WeightReport:
        return WeightReport(**self.read_weight_report())

    def add_lora(self, request: Any) -> bool:
        if not hasattr(self.model_runner, "lora_manager"):
            raise RuntimeError("LoRA is not enabled")
        return bool(self.model_runner.lora_manager.add_adapter(request))

    def update_base(self, *, ends: bool = True) -> None:
        self.update_flattened_params([*TENSORS])
        if ends:
            self.process_weights_after_loading()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker with ms-swift's extension without a network: it loads tensors by name."""

    def update_flattened_params(self: Any, names: list[str]) -> None:
        self.model_runner.model.load_weights(weights=[(name, TENSORS[name]) for name in names])

    def update_adapter_param(self: Any, config: Any, names: list[str]) -> None:
        tensors = {name: ADAPTER[name] for name in names}
        self.add_lora(SimpleNamespace(lora_tensors=tensors, lora_int_id=111))

    for name, function in {
        "update_named_param": lambda self, name, *_: update_flattened_params(self, [name]),
        "update_flattened_params": update_flattened_params,
        "update_adapter_param": update_adapter_param,
        "update_adapter_flattened_param": update_adapter_param,
        "process_weights_after_loading": lambda self: None,
    }.items():
        monkeypatch.setattr(WeightSyncWorkerExtension, name, function)
    return Worker()


def test_an_update_is_recorded_until_the_next(worker: Worker) -> None:
    """The report is of the whole update, with the parameters that it left as they were."""
    assert worker.report() == WeightReport()
    worker.update_named_param("a.base_layer.weight", "float32", (3,))
    worker.update_flattened_params(["b"])  # type: ignore[list-item]
    worker.process_weights_after_loading()
    for _ in range(2):  # a trainer may ask twice
        assert worker.report() == WeightReport(BASE)
    worker.update_flattened_params(["b"])  # type: ignore[list-item]
    assert list(worker.report().loaded) == ["b"]
    for ignored, unfilled in (("b", ["b"]), ("", []), ("ab", [*BASE])):
        worker.model_runner.model.ignored = set(ignored)
        worker.update_base()
        assert worker.report().unfilled == unfilled
    assert worker.report().loaded == {}
    # A quantized model has parameters that no update fills.
    worker.model_runner.model_config = SimpleNamespace(quantization="fp8")
    worker.update_base()
    assert worker.report().unfilled == []


def test_a_worker_joins_under_its_number(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []

    class StatelessProcessGroup(SimpleNamespace):
        @staticmethod
        def create(**kwargs: Any) -> Any:
            return StatelessProcessGroup(kwargs=kwargs, rank=0, barrier=dict)

    def init_communicator(self: Any, *where: Any) -> None:
        group = rollout.StatelessProcessGroup.create(host="host")
        bounds = (group.kwargs, group.barrier(), group.timeout)
        joined.append((*where, os.environ.get(REPLICA_NUMBER), *bounds))

    monkeypatch.setattr(rollout, "StatelessProcessGroup", StatelessProcessGroup)
    monkeypatch.setattr(WeightSyncWorkerExtension, "init_communicator", init_communicator)
    monkeypatch.setenv(REPLICA_NUMBER, "5")
    worker.join_group("host", 7, 3, None, 4.0, watches=False)
    worker.join_group("host", 7, 3, 0, 9.5, watches=False)
    assert os.environ[REPLICA_NUMBER] == "5"
    assert joined == [
        ("host", 7, 3, "5", {"host": "host", "store_timeout": 4}, {"timeout": 4.0}, 4.0),
        ("host", 7, 3, "0", {"host": "host", "store_timeout": 9}, {"timeout": 9.5}, 9.5),
    ]
    assert rollout.StatelessProcessGroup is StatelessProcessGroup


@pytest.mark.parametrize(
    ("dtype", "quantization", "cache", "bits"),
    [
        (torch.float32, None, "auto", 32),
        (torch.bfloat16, None, "bfloat16", 16),
        (torch.bfloat16, "bitsandbytes", "auto", 8),
        (torch.float32, None, "fp8_e5m2", 8),
    ],
)
def test_the_fewest_bits_of_an_engines_numbers_are_told(
    dtype: torch.dtype, quantization: str | None, cache: str, bits: int, worker: Worker
) -> None:
    """They bound the gap between rollout and training."""
    worker.vllm_config = SimpleNamespace(  # type: ignore[attr-defined]
        model_config=SimpleNamespace(dtype=dtype, quantization=quantization),
        cache_config=SimpleNamespace(cache_dtype=cache),
    )
    assert worker.read_number_bits() == bits


# --- adapters ---


@pytest.mark.parametrize("method", ["update_adapter_flattened_param", "update_adapter_param"])
def test_an_adapter_is_recorded_with_its_base(method: str, worker: Worker) -> None:
    """After a base, the report has base and adapter; later only the last adapter. A base starts a
    new report."""
    worker.model_runner.lora_manager = Manager()
    whole, first = shapes_of(ADAPTER.items()), list(ADAPTER)[:1]
    assert whole.keys() == ADAPTER.keys()
    for _ in range(2):
        worker.update_base()
        getattr(worker, method)({}, first)
        assert worker.report().loaded == BASE | {first[0]: "float32 (2, 3)"}
        getattr(worker, method)({}, list(ADAPTER))
        assert worker.report().loaded == whole
    # vLLM scales matrices where they lie: in a colocated engine those are the trainer's own.
    assert ADAPTER["base_model.model.q.lora_B.weight"].tolist() == [[1.0, 1.0]] * 3


class Watch:
    """A watch that fails, or has given findings."""

    def __init__(self, *faults: str) -> None:
        self.faults, self.fails = faults, False

    def record_arrived(self, weights: Any) -> None:
        if self.fails:
            raise IndexError("Dimension out of range")

    def check_weights(self, model: Any, unfilled: Any) -> tuple[str, ...]:
        return self.faults

    def check_adapter(self, loras: Any) -> tuple[str, ...]:
        return ()


REFUSALS = [
    (Manager("no"), f"vLLM refuses the adapter: no Give .* plain LoRA, {MERGED}"),
    (Manager(held="qedcba"), rf"5 modules \(a, b, c, d, e\).* others\), {MERGED}"),
    (Manager(held="abcdef"), r"6 modules \(a, b, c, d, e, \.\.\.\)"),
    (None, "LoRA is not enabled"),
]


@pytest.mark.parametrize(("manager", "told"), REFUSALS)
@pytest.mark.parametrize("before", [[], ["base"], ["adapter"], ["unended base", "adapter"]])
def test_a_refused_adapter_is_a_fault_until_another_update_comes(
    before: list[str], manager: Manager | None, told: str, worker: Worker
) -> None:
    """It stays one whatever came before and however often the server asks. Some clients do not
    report the end of a base. ms-swift asks only the first of several servers about adapters."""
    runner = worker.model_runner
    worker.engine_weights._watch = Watch()  # type: ignore[assignment]
    for kind in before:
        runner.lora_manager = Manager()
        if kind == "adapter":
            worker.update_adapter_param({}, list(ADAPTER))
        else:
            worker.update_base(ends=kind == "base")
    vars(runner).pop("lora_manager", None)
    if manager is not None:
        runner.lora_manager = manager
    with pytest.raises((WeightUpdateError, RuntimeError), match=told):
        worker.update_adapter_param({}, list(ADAPTER))
    for _ in range(2):
        assert re.search(told, worker.report().adapter_fault)
    worker.update_base()
    assert worker.report() == WeightReport(BASE, faults=[])
    runner.lora_manager = Manager()
    worker.update_adapter_param({}, list(ADAPTER))
    assert (worker.report().faults, worker.report().adapter_fault) == ([], "")


def test_a_watch_that_has_ended_finds_nothing_sound(worker: Worker) -> None:
    """Its earlier findings are dropped."""
    watch = Watch("b is all zeros")
    worker.engine_weights._watch = watch  # type: ignore[assignment]
    worker.update_base()
    assert worker.report().faults == ["b is all zeros"]
    watch.fails = True
    for _ in range(2):
        worker.update_base()
        assert worker.report().faults is None
