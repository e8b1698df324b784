"""A weight update is compared with each engine's report; a failure ends every rank, and names the
engine and its tensors (M4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from swift.rlhf_trainers.utils import FlattenedTensorBucket

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.weights import sync
from swift_grpo_ext.weights.layout import StateDict
from swift_grpo_ext.weights.sync import WeightSync
from swift_grpo_ext.weights.update import WeightUpdateError, compare, shapes_of
from tests.rig.ranks import ThreadRanks, run_rank_groups

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
MISSHAPEN = {**WEIGHTS, "b": torch.tensor([3.0, 4.0])}
CONFIG = LoraConfig(r=3)

# --- comparisons ---


def test_tensors_are_named_with_type_and_shape() -> None:
    weight = torch.zeros(2, 3, dtype=torch.bfloat16)
    named = ["a.base_layer.weight", "a.base_layer.lora_A.weight"]
    assert shapes_of((name, weight) for name in named) == {
        "a.weight": "bfloat16 (2, 3)",
        "a.base_layer.lora_A.weight": "bfloat16 (2, 3)",
    }


SENT = {f"layer.{i}": "float32 (2,)" for i in range(9)}
WRONG = {**SENT, "layer.3": "float32 (3,)"}
del WRONG["layer.7"]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (WeightReport(dict(reversed(SENT.items()))), None),
        (
            WeightReport(WRONG),
            r"^replica 0 does not hold .* 9 tensors: 1 did not arrive \(layer\.",
        ),
        (WeightReport(WRONG), r"; 1 have another type or shape \(layer\.3\)"),
        (WeightReport(), r"9 did not arrive \(layer\.0, .*4, \.\.\.\)"),
        (WeightReport(adapter_fault="why"), r"^replica 0 does not generate with .*\. why$"),
        (WeightReport(SENT, ["a", "b"]), r"2 of its parameters were left as .* \(a, b\)\."),
    ],
)
def test_a_difference_is_named(report: WeightReport, message: str | None) -> None:
    with pytest.raises(WeightUpdateError, match=message) if message else nullcontext():
        compare(SENT, report, "replica 0")


# --- servers ---


class Servers:
    """Servers with two workers that keep loaded tensors; `calls` has the calls. As ms-swift's
    client it takes adapters."""

    def __init__(self, second: StateDict | None = None, **failures: Exception) -> None:
        self.loaded: list[StateDict] = [{}, {}]
        self.calls: list[str] = []
        self._second, self.failures = second, failures
        self.fault: dict[str, Any] = {}  # fields of the workers' reports

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.failures:
            raise self.failures[name.split()[0]]

    def load(self, state_dict: StateDict) -> None:
        self._call(f"load {' '.join(state_dict)}")
        self.loaded[0] |= state_dict
        self.loaded[1] |= {n: (self._second or state_dict)[n] for n in state_dict}

    def bounded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reconnect(self, *, again: bool = False) -> bool:
        self._call("reconnect again" if again else "reconnect")
        return again

    def weight_reports(self) -> list[tuple[str, WeightReport]]:
        self._call("reports")
        loaded = [shapes_of(weights.items()) for weights in self.loaded]
        self.loaded = [{}, {}]
        return [
            (f"worker {i}", WeightReport(**({"loaded": shapes} | self.fault)))
            for i, shapes in enumerate(loaded)
        ]

    def update_adapter_flattened_param(self, config: Any, metadatas: Any, flattened: Any) -> None:
        assert config == CONFIG
        bucket = FlattenedTensorBucket(flattened_tensor=flattened, metadata=metadatas)
        self.load(bucket.reconstruct_tensors())

    def update_adapter_param(self, config: Any, tensors: StateDict) -> None:
        assert config == CONFIG
        self.load(tensors)


def send_parts(weights: WeightSync, rank: int, servers: Servers) -> None:
    """Send two parts, as ms-swift's update does; other ranks take part."""
    for name, tensor in WEIGHTS.items():
        weights.send({name: tensor}, servers.load if rank == 0 else lambda _: None)


def update(servers: Servers, move: Callable[[WeightSync, int, bool], None]) -> list[str]:
    """Return the error of the update on each of two ranks; rank 0 has the servers."""

    def work(ranks: ThreadRanks) -> str:
        weights = WeightSync(ranks, servers if ranks.rank == 0 else None)
        try:
            weights.update(lambda group_recreated: move(weights, ranks.rank, group_recreated))
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return ""

    return run_rank_groups(2, work)


def test_an_update_is_sent_and_compared_on_every_worker() -> None:
    """Each update, also a second or an empty one, is compared with its own tensors."""
    servers = Servers()
    weights = WeightSync(RankGroup(), servers)
    for _ in range(2):
        weights.update(lambda _: send_parts(weights, 0, servers))
    assert servers.calls == ["reconnect", "load a", "load b", "reports"] * 2
    weights.update(lambda _: weights.send({"a": WEIGHTS["a"]}, servers.load))  # `b` is not missed
    weights.update(lambda _: None)
    assert servers.calls[-3:] == ["load a", "reports", "reconnect"]


WHOLE = ["reconnect", "load a", "load b", "reports"]


@pytest.mark.parametrize(
    ("servers", "raises", "failing", "error", "calls"),
    [
        (Servers(second=MISSHAPEN), {}, 0, "WeightUpdateError: worker 1 does not hold ", WHOLE),
        # Ranks agree before the first of them gathers weights, where others would wait for it.
        (Servers(reconnect=OSError("gone")), {}, 0, "OSError: gone", ["reconnect"]),
        (
            Servers(load=OSError("reset")),  # is tried twice; the rest is gathered only
            *({}, 0, "OSError: reset"),
            ["reconnect", "load a", "reconnect again", "load a"],
        ),
        (Servers(), {0: WeightUpdateError("no")}, 0, "WeightUpdateError: no", WHOLE[:3]),
        (Servers(), {1: MemoryError("small")}, 1, "MemoryError: small", WHOLE),
    ],
)
def test_a_failure_on_one_rank_ends_all(
    servers: Servers,
    raises: dict[int, Exception],
    failing: int,
    error: str,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failing rank keeps its own exception; the others name it. Only what the servers did not
    get is tried again."""
    logged: list[str] = []
    monkeypatch.setattr(sync.logger, "error", logged.append)

    def move(weights: WeightSync, rank: int, group_recreated: bool) -> None:
        send_parts(weights, rank, servers)
        if rank in raises:
            raise raises[rank]

    errors = update(servers, move)
    own = errors.pop(failing)
    assert own.startswith(error)
    assert errors == [f"RolloutError: The rollout failed on rank {failing}: {own}"]
    assert set(logged) == {f"The weight update failed on rank {failing}: {own}"}
    assert servers.calls == calls


def test_an_update_that_was_not_sent_is_made_once_more() -> None:
    """All ranks send all weights again, with the base of adapters after a new group."""
    servers = Servers(load=ConnectionError("reset"))
    moves: list[tuple[int, bool]] = []
    took_part: list[int] = []

    def move(weights: WeightSync, rank: int, group_recreated: bool) -> None:
        moves.append((rank, group_recreated))
        if rank > 0:
            weights.send(WEIGHTS, lambda _: took_part.append(rank))
        send_parts(weights, rank, servers)
        if rank == 0:
            servers.failures.clear()

    assert update(servers, move) == ["", ""]
    assert sorted(moves) == [(0, False), (0, True), (1, False), (1, True)]
    assert servers.calls[:3] == ["reconnect", "load a", "reconnect again"]
    assert servers.calls[-1] == "reports"
    assert took_part == [1, 1]


@pytest.mark.parametrize("mismatch", ["stop", "warn"])
def test_what_a_watch_finds_fails_the_update(
    mismatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names engine and tensor, and is not tried again."""
    servers = Servers()
    servers.fault = {"faults": ["b is all zeros"]}
    warned: list[str] = []
    monkeypatch.setattr(sync.logger, "warning", warned.append)
    weights = WeightSync(RankGroup(), servers, mismatch)
    said = r"worker 0: the weight update has failed\. b is all zeros\. "
    with pytest.raises(WeightUpdateError, match=said) if mismatch == "stop" else nullcontext():
        weights.update(lambda _: send_parts(weights, 0, servers))
    assert servers.calls == WHOLE
    assert len(warned) == (2 if mismatch == "warn" else 0)


@pytest.mark.parametrize("flattens", [True, False])
def test_an_adapter_is_sent_and_compared(flattens: bool) -> None:
    client: Any = Servers()
    weights = WeightSync(RankGroup(), client)

    def send() -> None:
        """The end of ms-swift's `_move_adapter_to_vllm`."""
        if flattens:
            bucket = FlattenedTensorBucket(named_tensors=list(WEIGHTS.items()))
            parts = bucket.get_metadata(), bucket.get_flattened_tensor()
            client.update_adapter_flattened_param(CONFIG, *parts)
        else:
            client.update_adapter_param(CONFIG, WEIGHTS)

    weights.update(lambda _: weights.send_adapter(client, send))
    assert client.calls == ["reconnect", "load a b", "reports"]
    assert not [name for name in vars(client) if name.startswith("update_")]
    client.fault = {"loaded": {"a": "float32 (2,)"}}
    with pytest.raises(WeightUpdateError, match=r"worker 0 .*1 did not arrive \(b\)"):
        weights.update(lambda _: weights.send_adapter(client, send))


# --- colocated ---


class Engine:
    """A colocated engine that takes some weights, by vLLM's `load_weights`."""

    def __init__(self, taken: StateDict, filled: set[str] | None = None) -> None:
        self._taken, self._filled = taken, filled
        self.model_config = SimpleNamespace(quantization=None)
        self.inner_model_executor = self.driver_worker = self.worker = self
        self.model_runner = self.model = self

    def named_parameters(self) -> list[tuple[str, None]]:
        return [("ab", None), ("c", None)]

    def load_weights(self, weights: Any) -> set[str] | None:
        assert dict(weights) == self._taken
        return self._filled


@pytest.mark.parametrize(
    ("taken", "filled", "message"),
    [
        (WEIGHTS, None, None),  # an engine that does not say what it filled
        (WEIGHTS, {"ab", "c"}, None),
        (MISSHAPEN, None, r"The colocated engine of rank 0 .* another type or shape \(b\)"),
        (WEIGHTS, {"ab"}, r"1 of its parameters were left as they were \(c\)"),
        (WEIGHTS, set(), r"2 did not arrive \(a, b\)"),
    ],
)
def test_what_a_colocated_engine_takes_is_compared(
    taken: StateDict, filled: set[str] | None, message: str | None
) -> None:
    engine: Any = Engine(taken, filled)
    weights = WeightSync(RankGroup(), None)

    def load(state_dict: StateDict) -> None:
        engine.load_weights(taken.items())

    for _ in range(2):
        with pytest.raises(WeightUpdateError, match=message) if message else nullcontext():
            weights.update(lambda _: weights.load_colocated(WEIGHTS, engine, load))


def test_a_colocated_engine_has_to_use_the_adapter_that_it_is_given() -> None:
    held = SimpleNamespace(modules={}, get_adapter=lambda _: SimpleNamespace(loras={"q": 1}))
    added = {"add_adapter": lambda manager, request: True, "_adapter_manager": held}
    manager: Any = type("Manager", (), added)()
    engine: Any = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    engine.inner_model_executor = engine.driver_worker = engine.worker = engine
    request = SimpleNamespace(lora_tensors={"q": torch.ones(2)}, lora_int_id=111)
    weights = WeightSync(RankGroup(), None)
    with pytest.raises(WeightUpdateError, match=r"ignores the adapter's parts for 1 modules \(q\)"):
        weights.update(lambda _: weights.load_adapter(engine, lambda: manager.add_adapter(request)))
