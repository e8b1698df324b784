"""Adapters that lie apart from an engine's weights: recorded, and refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from peft import LoraConfig
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rlhf_trainers.utils import FlattenedTensorBucket

from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.weights.checksums import (
    WeightChecksums,
    WeightUpdateError,
    compare,
    weight_checksums,
)
from swift_grpo_ext.weights.receiver import VerifiedWeightSyncWorkerExtension
from swift_grpo_ext.weights.updates import WeightUpdates
from tests.ranks import ThreadRanks, run_rank_groups

ADAPTER = {
    "base_model.model.q.lora_A.weight": torch.arange(6.0).reshape(2, 3),
    "base_model.model.q.lora_B.weight": torch.ones(3, 2),
    "base_model.model.experts.lora_A.weight": torch.ones(2),
    "base_model.model.experts.base_layer.lora_A.weight": torch.zeros(2),
}
MERGED = "--vllm_enable_lora on both sides: adapters are then merged into the engine's weights."


@pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.28"), reason="checks/preflight.py refuses them on CPU"
)
def test_vllm_takes_or_refuses_them_by_name() -> None:
    """vLLM's own manager: what it is given stays the trainer's, also where it shares memory."""
    script = [sys.executable, "-m", "tests.weights.adapter_manager"]
    said = subprocess.run(script, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-3000:]
    refused = "vLLM refuses the adapter: "
    rank = "LoRA rank {} is greater than max_lora_rank 16. Give --vllm_max_lora_rank {} to "
    rank += "`swift rollout`, or train with --lora_rank 16 or less."
    saved = "vLLM only supports modules_to_save being either None or "
    saved += '["classifier", "score"] for classification models. Unsupported modules_to_save: '
    ignored = "vLLM has no place for parts of the adapter: it ignores those of 1 modules (tower). "
    ignored += "Train none there (--freeze_vit true and --freeze_aligner true for the tower of a "
    ignored += "model that sees, --target_modules for others), or leave out "
    assert json.loads(said.stdout.splitlines()[-1]) == {
        "plain": [None, 6, True],
        "rank": [refused + rank.format(64, 64), 6, True],
        "rank pattern": [refused + rank.format(32, 32), 6, True],
        "DoRA": [
            f"{refused}vLLM does not yet support DoRA. Leave out --use_dora, or {MERGED}",
            *(9, True),
        ],
        "saved module": [
            f"{refused}{saved}['head'] Leave out --modules_to_save, or {MERGED}",
            *(7, True),
        ],
        "biases": [
            f"{refused}Adapter bias is not supported. Leave out --lora_bias, or {MERGED}",
            *(6, True),
        ],
        "tower": [ignored + MERGED, 8, True],
    }


def test_a_fault_is_told_before_names() -> None:
    fault = {ADAPTER_FAULT: "vLLM refuses the adapter: why."}
    message = (
        r"^worker 1 does not draw with the trainer's adapter\. vLLM refuses the adapter: why\."
    )
    with pytest.raises(WeightUpdateError, match=message):
        compare(weight_checksums(ADAPTER.items()), fault, "worker 1")


# --- a worker ---


class Manager:
    """vLLM's manager of adapters, of which each layer takes all, or which refuses all."""

    lora_config = SimpleNamespace(max_lora_rank=16)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self._adapter_manager = SimpleNamespace(
            get_adapter=lambda _: SimpleNamespace(loras={"q": 1}),
            lora_index_to_id=[111],
            modules={"q": 1},
        )

    def add_adapter(self, request: Any) -> bool:
        if self.fault:
            raise ValueError(self.fault)
        for tensor in request.lora_tensors.values():
            tensor *= 4  # as vLLM scales them
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
    [(Manager("no"), "vLLM refuses the adapter: no"), (None, "LoRA is not enabled")],
)
def test_a_worker_tells_of_a_refusal_until_another_comes(
    manager: Manager | None, told: str, make_worker: Callable[..., Worker]
) -> None:
    """An engine that has adapters switched off is one of several servers, of which ms-swift asks
    the first."""
    worker = make_worker(manager)
    with pytest.raises((WeightUpdateError, RuntimeError), match=told):
        worker.update_adapter_flattened_param({}, [])
    assert told in worker.read_weight_checksums()[ADAPTER_FAULT]
    worker.model_runner.lora_manager = Manager()
    worker.update_adapter_flattened_param({}, [])
    assert worker.read_weight_checksums() == weight_checksums(ADAPTER.items())


# --- a trainer ---


class Client:
    """ms-swift's, whose server keeps what it is sent."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: WeightChecksums = {}

    def update_adapter_flattened_param(self, config: Any, metadatas: Any, flattened: Any) -> None:
        bucket = FlattenedTensorBucket(flattened_tensor=flattened, metadata=metadatas)
        self.calls.append("flattened")
        self.held |= weight_checksums(bucket.reconstruct_tensors().items())

    def update_adapter_param(self, config: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.calls.append("parts")
        self.held |= weight_checksums(tensors.items())

    # As `RolloutServers`:

    def bounded(self) -> Any:
        return nullcontext()

    def reconnect(self, *, again: bool) -> bool:
        return False

    def loaded_checksums(self) -> list[tuple[str, WeightChecksums]]:
        return [("worker 0", self.held)]


def sender(client: Client, *, flattens: bool) -> Callable[[], None]:
    """The end of ms-swift's `_move_adapter_to_vllm`."""
    config = LoraConfig()

    def move() -> None:
        if flattens:
            bucket = FlattenedTensorBucket(named_tensors=list(ADAPTER.items()))
            client.update_adapter_flattened_param(
                config, bucket.get_metadata(), bucket.get_flattened_tensor()
            )
        else:
            client.update_adapter_param(config, ADAPTER)

    return move


@pytest.mark.parametrize("flattens", [True, False])
def test_what_is_sent_is_compared(flattens: bool) -> None:
    client: Any = Client()
    weights = WeightUpdates(SingleRank(), client)
    send = sender(client, flattens=flattens)
    weights.update(lambda _: weights.send_adapter(client, send))
    assert client.calls == ["flattened" if flattens else "parts"]
    assert not [name for name in vars(client) if name.startswith("update_")]
    name = list(ADAPTER)[-1]
    for change, message in (
        ({name: "float32 (2,) 01"}, rf"1 arrived changed \({name}\)"),
        ({ADAPTER_FAULT: "why"}, "worker 0 does not draw with the trainer's adapter. why"),
    ):
        client.loaded_checksums = lambda change=change: [("worker 0", client.held | change)]
        with pytest.raises(WeightUpdateError, match=message):
            weights.update(lambda _: weights.send_adapter(client, send))


def test_after_a_failure_an_adapter_is_gathered_and_not_sent() -> None:
    """The other ranks gather with rank 0."""
    client: Any = Client()
    gathered: list[int] = []

    def work(ranks: ThreadRanks) -> str:
        weights = WeightUpdates(ranks, client if ranks.rank == 0 else None)
        send = sender(client, flattens=True) if ranks.rank == 0 else list

        def fail(_: Any) -> None:
            raise WeightUpdateError("of the base")

        def move() -> None:
            gathered.append(ranks.rank)
            send()

        def update(_: bool) -> None:
            weights.send({}, fail if ranks.rank == 0 else list)
            weights.send_adapter(client if ranks.rank == 0 else None, move)

        with pytest.raises(WeightUpdateError, match="of the base") as failed:
            weights.update(update)
        return str(failed.value)

    run_rank_groups(2, work)
    assert (sorted(gathered), client.calls) == ([0, 1], [])


@pytest.mark.parametrize("fault", ["", "no"])
def test_a_colocated_engine_that_refuses_ends_the_update(fault: str) -> None:
    """vLLM scales the engine's own copy."""
    manager = Manager(fault)
    engine: Any = SimpleNamespace()
    engine.inner_model_executor = engine.driver_worker = engine.worker = engine
    engine.model_runner = SimpleNamespace(lora_manager=manager)
    weights = WeightUpdates(SingleRank(), None)
    tensor = torch.ones(2)
    request = SimpleNamespace(
        lora_tensors={"q.lora_A.weight": tensor}, lora_int_id=111, peft_config={"r": 8}
    )

    def update() -> None:
        weights.update(lambda _: weights.load_adapter(engine, lambda: manager.add_adapter(request)))

    if fault:
        with pytest.raises(WeightUpdateError, match="vLLM refuses the adapter: no Leave out"):
            update()
    else:
        update()
    assert torch.equal(tensor, torch.ones(2))
