"""A weight update is compared with each engine's report; a failure ends every rank, and names the
engine and its tensors (M4)."""

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
from swift_grpo_ext.weights.layout import StateDict
from swift_grpo_ext.weights.sync import WeightSync
from swift_grpo_ext.weights.update import WeightUpdateError, compare, shapes_of
from tests.rig.ranks import ThreadRanks, run_rank_groups

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
MISSHAPEN = {**WEIGHTS, "b": torch.tensor([3.0, 4.0])}
CONFIG = LoraConfig(r=3)
SENT = {f"layer.{i}": "float32 (2,)" for i in range(9)}
WRONG = {**SENT, "layer.3": "float32 (3,)"}
del WRONG["layer.7"]


def raising(message: str | None) -> Any:
    return pytest.raises(WeightUpdateError, match=message) if message else nullcontext()


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (WeightReport(dict(reversed(SENT.items()))), None),
        (WeightReport(WRONG), r"^replica 0 does not hold .* 9 tensors: 1 did not arrive \(layer\."),
        (WeightReport(WRONG), r"; 1 have another type or shape \(layer\.3\)"),
        (WeightReport(), r"9 did not arrive \(layer\.0, .*4, \.\.\.\)"),
        (WeightReport(adapter_fault="why"), r"^replica 0 does not generate with .*\. why$"),
        (WeightReport(SENT, ["a", "b"]), r"2 of its parameters were left as .* \(a, b\)\."),
    ],
)
def test_a_difference_is_named(report: WeightReport, message: str | None) -> None:
    with raising(message):
        compare(SENT, report, "replica 0")


# --- servers ---


class Servers:
    """Servers with two workers that keep the shapes of tensors, and ms-swift's client of them;
    `calls` has the calls. The second worker loads `second` in place of what was sent."""

    def __init__(self, second: StateDict | None = None, **failures: Exception) -> None:
        self.loaded: list[dict[str, str]] = [{}, {}]
        self.calls: list[str] = []
        self._second, self.failures = second, failures
        self.fault: dict[str, Any] = {}  # fields of the workers' reports

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.failures:
            raise self.failures[name.split()[0]]

    def load(self, state_dict: StateDict) -> None:
        self._call(f"load {' '.join(state_dict)}")
        for held, source in zip(self.loaded, (state_dict, self._second or state_dict), strict=True):
            held |= shapes_of((name, source[name]) for name in state_dict)

    def bounded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reconnect(self, *, again: bool = False) -> bool:
        self._call("reconnect again" if again else "reconnect")
        return again

    def weight_reports(self) -> list[tuple[str, WeightReport]]:
        self._call("reports")
        loaded, self.loaded = self.loaded, [{}, {}]
        return [
            (f"worker {i}", WeightReport(**({"loaded": shapes} | self.fault)))
            for i, shapes in enumerate(loaded)
        ]

    def update_adapter_flattened_param(self, config: Any, metadatas: Any, flattened: Any) -> None:
        assert config == CONFIG
        bucket = FlattenedTensorBucket(flattened_tensor=flattened, metadata=metadatas)
        self.load(bucket.reconstruct_tensors())

    def update_adapter_param(self, config: Any, tensors: StateDict) -> None:
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


WHOLE = ["reconnect", "load a", "load b", "reports"]


def test_an_update_is_sent_and_compared_on_every_worker() -> None:
    """Each update, also a second or an empty one, is compared with its own tensors."""
    servers = Servers()
    weights = WeightSync(RankGroup(), servers)
    for _ in range(2):
        weights.update(lambda _: send_parts(weights, 0, servers))
    assert servers.calls == WHOLE * 2
    weights.update(lambda _: weights.send({"a": WEIGHTS["a"]}, servers.load))  # `b` is not missed
    weights.update(lambda _: None)
    assert servers.calls[-3:] == ["load a", "reports", "reconnect"]


@pytest.mark.parametrize(
    ("servers", "raises", "error", "calls"),
    [
        (Servers(second=MISSHAPEN), {}, "WeightUpdateError: worker 1 does not hold ", WHOLE),
        # Ranks agree before the first of them gathers weights, where others would wait for it.
        (Servers(reconnect=OSError("gone")), {}, "OSError: gone", ["reconnect"]),
        (
            Servers(load=OSError("reset")),  # is tried twice; the rest is gathered only
            *({}, "OSError: reset"),
            ["reconnect", "load a", "reconnect again", "load a"],
        ),
        (Servers(), {0: WeightUpdateError("no")}, "WeightUpdateError: no", WHOLE[:3]),
        (Servers(), {1: MemoryError("small")}, "MemoryError: small", WHOLE),
    ],
)
def test_a_failure_on_one_rank_ends_all(
    servers: Servers, raises: dict[int, Exception], error: str, calls: list[str]
) -> None:
    """The failing rank keeps its own exception; the others name it. Only what the servers did not
    get is tried again."""

    def move(weights: WeightSync, rank: int, group_recreated: bool) -> None:
        send_parts(weights, rank, servers)
        if rank in raises:
            raise raises[rank]

    failing = max(raises, default=0)
    errors = update(servers, move)
    own = errors.pop(failing)
    assert own.startswith(error)
    assert errors == [f"RolloutError: The rollout failed on rank {failing}: {own}"]
    assert servers.calls == calls


def test_an_update_that_was_not_sent_is_made_once_more() -> None:
    """All ranks send all weights again, with the base of adapters after a new group."""
    servers = Servers(load=ConnectionError("reset"))
    moves: list[tuple[int, bool]] = []

    def move(weights: WeightSync, rank: int, group_recreated: bool) -> None:
        weights.send(WEIGHTS, servers.load if rank == 0 else lambda _: None)
        moves.append((rank, group_recreated))
        if rank == 0:
            servers.failures.clear()

    assert update(servers, move) == ["", ""]
    assert sorted(moves) == [(0, False), (0, True), (1, False), (1, True)]
    assert servers.calls == ["reconnect", "load a b", "reconnect again", "load a b", "reports"]


@pytest.mark.parametrize("mismatch", ["stop", "warn"])
def test_what_a_watch_finds_fails_the_update(mismatch: str, warnings: list[str]) -> None:
    """The error names engine and tensor, and is not tried again."""
    servers = Servers()
    servers.fault = {"faults": ["b is all zeros"]}
    weights = WeightSync(RankGroup(), servers, mismatch)
    told = r"worker 0: the weight update has failed\. b is all zeros\. "
    with raising(told if mismatch == "stop" else None):
        weights.update(lambda _: send_parts(weights, 0, servers))
    assert servers.calls == WHOLE
    assert len(warnings) == (2 if mismatch == "warn" else 0)


def test_an_adapter_is_sent_and_compared() -> None:
    client: Any = Servers()
    weights = WeightSync(RankGroup(), client)
    bucket = FlattenedTensorBucket(named_tensors=list(WEIGHTS.items()))
    parts = bucket.get_metadata(), bucket.get_flattened_tensor()
    # The ends of ms-swift's `_move_adapter_to_vllm`.
    for send in (
        lambda: client.update_adapter_flattened_param(CONFIG, *parts),
        lambda: client.update_adapter_param(CONFIG, WEIGHTS),
    ):
        client.calls.clear()
        weights.update(lambda _, send=send: weights.send_adapter(client, send))  # type: ignore[misc]
        assert client.calls == ["reconnect", "load a b", "reports"]
    assert not [name for name in vars(client) if name.startswith("update_")]
    client.fault = {"loaded": {"a": "float32 (2,)"}}
    with raising(r"worker 0 .*1 did not arrive \(b\)"):
        weights.update(lambda _: weights.send_adapter(client, send))


# --- colocated ---


@pytest.mark.parametrize(
    ("taken", "filled", "message"),
    [
        (WEIGHTS, {"ab", "c"}, None),
        (WEIGHTS, {"ab"}, r"1 of its parameters were left as they were \(c\)"),
        # An engine that does not say what it filled.
        (MISSHAPEN, None, r"The colocated engine of rank 0 .* another type or shape \(b\)"),
    ],
)
def test_what_a_colocated_engine_takes_is_compared(
    taken: StateDict, filled: set[str] | None, message: str | None
) -> None:
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None),
        named_parameters=lambda: [("ab", None), ("c", None)],
        load_weights=lambda weights: filled,
    )
    engine.inner_model_executor = engine.driver_worker = engine.worker = engine
    engine.model_runner = engine.model = engine
    weights = WeightSync(RankGroup(), None)

    def load(state_dict: StateDict) -> None:
        assert state_dict is WEIGHTS
        engine.load_weights(taken.items())

    for _ in range(2):
        with raising(message):
            weights.update(lambda _: weights.load_colocated(WEIGHTS, engine, load))
