"""A worker's end of weight updates: what it loaded, for as long as it holds it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension

from swift_grpo_ext.weights import receiver
from swift_grpo_ext.weights.checksums import UNFILLED, weight_checksums
from swift_grpo_ext.weights.receiver import (
    REPLICA_NUMBER,
    CPUWeightSyncWorkerExtension,
    VerifiedWeightSyncWorkerExtension,
)


class Model:
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.ignored: set[str] = set()

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        self.weights |= dict(weights)
        return {name for name, _ in weights} - self.ignored

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(TENSORS.items())


class Worker(VerifiedWeightSyncWorkerExtension):
    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(model=Model())


TENSORS = {"a": torch.arange(3.0), "b": torch.ones(2)}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """ms-swift's extension without a network: it loads what it is named."""

    def update_named_param(self: Any, name: str, dtype: str, shape: Any) -> None:
        self.model_runner.model.load_weights([(name, TENSORS[name])])

    def update_flattened_params(self: Any, metadatas: list[dict[str, Any]]) -> None:
        self.model_runner.model.load_weights([(m["name"], TENSORS[m["name"]]) for m in metadatas])

    for function in (update_named_param, update_flattened_params):
        monkeypatch.setattr(WeightSyncWorkerExtension, function.__name__, function)
    monkeypatch.setattr(
        WeightSyncWorkerExtension, "process_weights_after_loading", lambda self: None
    )
    monkeypatch.setattr(rollout, "_set_death_signal", lambda: None)
    return Worker()


def test_an_update_is_recorded_until_the_next(worker: Worker) -> None:
    assert worker.read_weight_checksums() == {}
    worker.update_named_param("a", "float32", (3,))
    worker.update_flattened_params([{"name": "b"}])
    worker.process_weights_after_loading()
    expected = weight_checksums(TENSORS.items())
    assert worker.read_weight_checksums() == expected
    assert worker.read_weight_checksums() == expected  # a trainer may ask twice
    worker.update_flattened_params([{"name": "b"}])
    assert list(worker.read_weight_checksums()) == ["b"]
    worker.update_flattened_params([{"name": "a"}])
    assert sorted(worker.read_weight_checksums()) == ["a", "b"]


def test_parameters_that_an_update_left_as_they_were_are_told(worker: Worker) -> None:
    """Of the whole update; the next one begins anew."""
    model = worker.model_runner.model
    for ignored, told in (("b", "b"), ("", None), ("a", "a"), ("ab", "a b")):
        model.ignored = set(ignored)
        worker.update_flattened_params([{"name": "a"}, {"name": "b"}])
        assert UNFILLED not in worker.read_weight_checksums()
        worker.process_weights_after_loading()
        assert worker.read_weight_checksums().get(UNFILLED) == told
    assert list(worker.read_weight_checksums()) == [UNFILLED]


@pytest.mark.parametrize(
    ("config", "told"), [(None, "w"), (SimpleNamespace(quantization="fp8"), None)]
)
def test_a_cpu_worker_tells_too(config: Any, told: str | None, worker: Worker) -> None:
    """A quantized model has parameters that no update fills."""
    model = Model()
    model.named_parameters = lambda: [*TENSORS.items(), ("w", TENSORS["a"])]  # type: ignore[method-assign]

    class CPUWorker(CPUWeightSyncWorkerExtension):
        def __init__(self) -> None:
            self.model_runner = SimpleNamespace(
                model=model,
                model_config=config,
                reload_weights=lambda weights_iterator: model.load_weights(weights_iterator),
            )
            self._received, self._sums = [], []
            self._take(list(TENSORS.items()))

    held = CPUWorker()
    held.process_weights_after_loading()
    told_sums = held.read_weight_checksums()
    assert told_sums.pop(UNFILLED, None) == told
    assert told_sums == weight_checksums(TENSORS.items())


def test_a_worker_joins_under_its_number(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []

    class Group:
        @staticmethod
        def create(**kwargs: Any) -> Any:
            return SimpleNamespace(kwargs=kwargs, barrier=dict)

    def init_communicator(self: Any, host: str, port: int, world_size: int) -> None:
        group = rollout.StatelessProcessGroup.create(host=host)
        joined.append((host, port, world_size, os.environ.get(REPLICA_NUMBER), group.kwargs))

    monkeypatch.setattr(rollout, "StatelessProcessGroup", Group)
    monkeypatch.setattr(WeightSyncWorkerExtension, "init_communicator", init_communicator)
    monkeypatch.setenv(REPLICA_NUMBER, "5")
    worker.init_communicator("host", 7, 3)
    worker.init_communicator("host", 7, 3, 0, 9.5)
    assert os.environ[REPLICA_NUMBER] == "5"
    monkeypatch.delenv(REPLICA_NUMBER)
    worker.init_communicator("host", 7, 3, 1, 0.5)
    assert REPLICA_NUMBER not in os.environ
    assert joined == [
        ("host", 7, 3, "5", {"host": "host"}),
        ("host", 7, 3, "0", {"host": "host", "store_timeout": 9}),
        ("host", 7, 3, "1", {"host": "host", "store_timeout": 1}),
    ]
    assert rollout.StatelessProcessGroup is Group


def test_a_group_that_ends_lets_go_of_its_port(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[bool] = []
    monkeypatch.setattr(receiver.gc, "collect", lambda: collected.append(True))
    worker.communicator = object()
    worker.close_communicator()
    assert worker.communicator is None
    assert collected == [True]
