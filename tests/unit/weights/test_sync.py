"""Weight updates: comparisons with the engines' reports, and failures that end every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from swift_grpo_ext.weights.update import WeightUpdateError, shapes_of
from tests.rig.ranks import ThreadRanks, run_rank_groups

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
CONFIG = LoraConfig(r=3)


def misshapen() -> StateDict:
    return {**WEIGHTS, "b": torch.tensor([3.0, 4.0])}


class Servers:
    """Servers with two workers that keep loaded tensors; `calls` has the calls. As ms-swift's
    client it takes adapters."""

    def __init__(self, second: StateDict | None = None, **failures: Exception) -> None:
        self.loaded: list[StateDict] = [{}, {}]
        self.calls: list[str] = []
        self._second, self.failures = second, failures
        self.fault: dict[str, Any] = {}
        """Fields of the workers' reports."""

        self.is_bounded = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.failures:
            raise self.failures[name.split()[0]]

    def load(self, state_dict: StateDict) -> None:
        assert self.is_bounded
        self._call(f"load {' '.join(state_dict)}")
        self.loaded[0] |= state_dict
        self.loaded[1] |= {n: (self._second or state_dict)[n] for n in state_dict}

    @contextmanager
    def bounded(self) -> Iterator[None]:
        self.is_bounded = True
        try:
            yield
        finally:
            self.is_bounded = False

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


def update(
    servers: Servers | None, move: Callable[[WeightSync, int, bool], None], size: int = 1
) -> list[str]:
    """Return the error of the update on each rank; rank 0 has the servers."""

    def work(ranks: ThreadRanks) -> str:
        weights = WeightSync(ranks, servers if ranks.rank == 0 else None)
        try:
            weights.update(lambda group_recreated: move(weights, ranks.rank, group_recreated))
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return ""

    return run_rank_groups(size, work)


def sends(servers: Servers) -> Callable[[WeightSync, int, bool], None]:
    """Return ms-swift's update, which sends two parts; other ranks take part."""

    def move(weights: WeightSync, rank: int, group_recreated: bool) -> None:
        for name, tensor in WEIGHTS.items():
            weights.send({name: tensor}, servers.load if rank == 0 else lambda _: None)

    return move


def test_an_update_is_sent_and_compared_on_every_worker() -> None:
    """Each update, also a second or an empty one, is compared with its own tensors."""
    servers = Servers()
    weights = WeightSync(RankGroup(), servers)
    for _ in range(2):
        weights.update(lambda _: sends(servers)(weights, 0, False))
    assert servers.calls == ["reconnect", "load a", "load b", "reports"] * 2
    weights.update(lambda _: weights.send({"a": WEIGHTS["a"]}, servers.load))  # `b` is not missed
    weights.update(lambda _: None)
    assert servers.calls[-3:] == ["load a", "reports", "reconnect"]


@pytest.mark.parametrize(
    ("servers", "error", "calls"),
    [
        (
            Servers(second=misshapen()),
            r"WeightUpdateError: worker 1 does not hold .* 1 have another type or shape \(b\)",
            ["reconnect", "load a", "load b", "reports"],
        ),
        # Ranks agree before the first of them gathers weights, where others would wait for it.
        (Servers(reconnect=ConnectionError("gone")), "ConnectionError: gone", ["reconnect"]),
        (
            Servers(load=ConnectionError("reset")),  # is tried twice; the rest is gathered only
            "ConnectionError: reset",
            ["reconnect", "load a", "reconnect again", "load a"],
        ),
    ],
)
def test_a_failure_at_the_servers_ends_every_rank(
    servers: Servers, error: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(sync.logger, "error", logged.append)
    first, second = update(servers, sends(servers), size=2)
    with pytest.raises(AssertionError, match=f"^{error}"):
        raise AssertionError(first)
    assert second == f"RolloutError: The rollout failed on rank 0: {first}"
    assert set(logged) == {f"The weight update failed on rank 0: {first}"}
    assert servers.calls == calls


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_ends_all_and_is_not_tried_again(failing: int) -> None:
    """The failing rank keeps its own exception; the others name it."""
    servers = Servers()

    def move(weights: WeightSync, rank: int, group_recreated: bool) -> None:
        sends(servers)(weights, rank, group_recreated)
        if rank == failing:
            raise MemoryError("too small") if failing else WeightUpdateError("refused")

    own = "MemoryError: too small" if failing else "WeightUpdateError: refused"
    expected = [f"RolloutError: The rollout failed on rank {failing}: {own}"] * 2
    expected[failing] = own
    assert update(servers, move, size=2) == expected
    assert servers.calls.count("load a") == 1


def test_an_update_that_was_not_sent_is_made_once_more() -> None:
    """All ranks send all weights again, with the base of adapters after a new group."""
    servers = Servers(load=ConnectionError("reset"))
    moves: list[tuple[int, bool]] = []
    took_part: list[int] = []

    def move(weights: WeightSync, rank: int, group_recreated: bool) -> None:
        moves.append((rank, group_recreated))
        if rank > 0:
            weights.send(WEIGHTS, lambda _: took_part.append(rank))
        sends(servers)(weights, rank, group_recreated)
        if rank == 0:
            servers.failures.clear()

    assert update(servers, move, size=2) == ["", ""]
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
        weights.update(lambda _: sends(servers)(weights, 0, False))
    assert servers.calls == ["reconnect", "load a", "load b", "reports"]
    assert len(warned) == (2 if mismatch == "warn" else 0)


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
        (misshapen(), None, r"The colocated engine of rank 0 .* another type or shape \(b\)"),
        ({"a": WEIGHTS["a"]}, None, r"1 did not arrive \(b\)"),
        (WEIGHTS, {"ab"}, r"1 of its parameters were left as they were \(c\)"),
        (WEIGHTS, set(), r"2 did not arrive \(a, b\)"),
    ],
)
def test_what_a_colocated_engine_takes_is_compared(
    taken: StateDict,
    filled: set[str] | None,
    message: str | None,
) -> None:
    engine: Any = Engine(taken, filled)
    weights = WeightSync(RankGroup(), None)

    def load(state_dict: StateDict) -> None:
        engine.load_weights(taken.items())

    for _ in range(2):
        with pytest.raises(WeightUpdateError, match=message) if message else nullcontext():
            weights.update(lambda _: weights.load_colocated(WEIGHTS, engine, load))


# --- adapters ---


@pytest.mark.parametrize("flattens", [True, False])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({}, None),
        ({"loaded": {"a": "float32 (2,)"}}, r"worker 0 .*1 did not arrive \(b\)"),
        ({"adapter_fault": "why"}, r"worker 0 does not generate with the trainer's adapter\. why"),
    ],
)
def test_an_adapter_is_sent_and_compared(
    flattens: bool, fault: dict[str, Any], message: str | None
) -> None:
    client: Any = Servers()
    client.fault = fault
    weights = WeightSync(RankGroup(), client)

    def send() -> None:
        """The end of ms-swift's `_move_adapter_to_vllm`."""
        if flattens:
            bucket = FlattenedTensorBucket(named_tensors=list(WEIGHTS.items()))
            parts = bucket.get_metadata(), bucket.get_flattened_tensor()
            client.update_adapter_flattened_param(CONFIG, *parts)
        else:
            client.update_adapter_param(CONFIG, WEIGHTS)

    with pytest.raises(WeightUpdateError, match=message) if message else nullcontext():
        weights.update(lambda _: weights.send_adapter(client, send))
    assert client.calls == ["reconnect", "load a b", "reports"]
    assert not [name for name in vars(client) if name.startswith("update_")]


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
