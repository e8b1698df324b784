"""Weight updates: what is compared with what, and how a failure ends the run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.weights import updates
from swift_grpo_ext.weights.checksums import WeightUpdateError, weight_checksums
from swift_grpo_ext.weights.updates import StateDict, WeightUpdates, connect_servers
from tests.ranks import ThreadRanks, run_rank_groups

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}


def changed() -> StateDict:
    return {**WEIGHTS, "b": torch.tensor([4.0])}


class Servers:
    """Two workers, which hold what was loaded; keeps what is asked of it."""

    def __init__(self, second: StateDict | None = None) -> None:
        self.loaded: list[StateDict] = [{}, {}]
        self.calls: list[str] = []
        self._second = second

    def load(self, state_dict: StateDict) -> None:
        self.calls.append(f"load {' '.join(state_dict)}")
        self.loaded[0] |= state_dict
        self.loaded[1] |= {n: (self._second or state_dict)[n] for n in state_dict}

    def bounded(self) -> Any:
        return nullcontext()

    def reconnect(self, *, again: bool) -> bool:
        self.calls.append("reconnect again" if again else "reconnect")
        return again

    def loaded_checksums(self) -> list[tuple[str, dict[str, str]]]:
        self.calls.append("checksums")
        sums = [(f"worker {i}", weight_checksums(w.items())) for i, w in enumerate(self.loaded)]
        self.loaded = [{}, {}]
        return sums


def served(servers: Any) -> tuple[WeightUpdates, Callable[[bool], None]]:
    """An updater for servers, and ms-swift's update, which sends in two parts."""
    weights = WeightUpdates(SingleRank(), servers)

    def move(_: bool) -> None:
        for name, tensor in WEIGHTS.items():
            weights.send({name: tensor}, servers.load)

    return weights, move


def test_an_update_is_sent_and_compared_on_every_worker() -> None:
    """Again too: the second update is compared with what it sent itself."""
    servers = Servers()
    weights, move = served(servers)
    for _ in range(2):
        weights.update(move)
    assert servers.calls == ["reconnect", "load a", "load b", "checksums"] * 2


def test_a_worker_that_loaded_something_else_stops_the_run() -> None:
    weights, move = served(Servers(second=changed()))
    with pytest.raises(WeightUpdateError, match=r"worker 1 does not hold .* changed \(b\)"):
        weights.update(move)


def test_what_was_sent_before_is_forgotten() -> None:
    """A full update, then one of the adapter only."""
    servers = Servers()
    weights, move = served(servers)
    weights.update(move)
    weights.update(lambda _: None)
    assert servers.calls[-1] == "reconnect"


def test_other_ranks_take_part_and_send_nothing_of_their_own() -> None:
    """They gather with rank 0; only its sending counts."""
    servers = Servers()
    took_part: list[int] = []

    def work(ranks: ThreadRanks) -> Any:
        weights = WeightUpdates(ranks, servers if ranks.rank == 0 else None)  # type: ignore[arg-type]
        load = servers.load if ranks.rank == 0 else lambda _: took_part.append(ranks.rank)
        weights.update(lambda _: weights.send(WEIGHTS, load))
        return weights._sent

    first, *others = run_rank_groups(3, work)
    assert first == weight_checksums(WEIGHTS.items())
    assert others == [{}, {}]
    assert sorted(took_part) == [1, 2]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_ends_all(failing: int) -> None:
    """The rank itself keeps its own exception; the others name it."""

    def work(ranks: ThreadRanks) -> str:
        def move(_: bool) -> None:
            if ranks.rank == failing:
                raise ConnectionError("no route")

        with pytest.raises((ConnectionError, WeightUpdateError)) as failed:
            WeightUpdates(ranks, None).update(move)
        return f"{failed.type.__name__}: {failed.value}"

    expected = [
        f"WeightUpdateError: The weight update failed on rank {failing}: ConnectionError: no route"
    ] * 2
    expected[failing] = "ConnectionError: no route"
    assert run_rank_groups(2, work) == expected


def test_a_server_that_is_gone_is_a_failure() -> None:
    class Gone(Servers):
        def reconnect(self, *, again: bool) -> bool:
            raise ConnectionError("gone")

    weights, move = served(Gone())
    with pytest.raises(ConnectionError, match="gone"):
        weights.update(move)


# --- colocated ---


class Engine:
    """A colocated engine that takes some weights, through vLLM's `load_weights` or its CPU way."""

    def __init__(self, taken: StateDict, filled: set[str] | None = None) -> None:
        self._taken, self._filled = taken, filled
        self.inner_model = self.engine = self
        self.model_config = None

    def named_parameters(self) -> list[tuple[str, None]]:
        return [("ab", None), ("c", None)]

    def load_weights(self, weights: Any) -> set[str] | None:
        assert dict(weights) == self._taken
        return self._filled

    def reload_weights(self, weights: Any) -> None:
        assert dict(weights).keys() == WEIGHTS.keys()
        self.load_weights(self._taken.items())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_a_colocated_engine_takes_is_compared(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "has_accelerator", lambda: on_gpu)
    for taken, message in (
        (WEIGHTS, None),
        (changed(), r"The colocated engine of rank 1 .* arrived changed \(b\)"),
        ({"a": WEIGHTS["a"]}, r"1 did not arrive \(b\)"),
    ):
        engine = Engine(taken)

        def load(state_dict: StateDict, engine: Engine = engine) -> None:
            engine.inner_model.load_weights(engine._taken.items())

        def work(ranks: ThreadRanks, engine: Engine = engine, load: Any = load) -> str | None:
            if ranks.rank == 0:
                return None
            try:
                WeightUpdates(ranks, None).load_colocated(WEIGHTS, engine, load)
            except WeightUpdateError as e:
                return str(e)
            return None

        _, failure = run_rank_groups(2, work)
        if message is None:
            assert failure is None
        else:
            assert failure is not None
            with pytest.raises(WeightUpdateError, match=message):
                raise WeightUpdateError(failure)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("filled", "message"),
    [
        (None, None),  # an engine that does not say what it filled
        ({"ab", "c"}, None),
        ({"ab"}, r"rank 0 does not hold .* 1 of its parameters were left as they were \(c\)"),
        (set(), r"rank 0 does not hold .* 2 did not arrive \(a, b\)"),
    ],
)
def test_a_colocated_engine_that_fills_nothing_is_noticed(
    filled: set[str] | None, message: str | None, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "has_accelerator", lambda: on_gpu)
    engine, weights = Engine(WEIGHTS, filled), WeightUpdates(SingleRank(), None)

    def load(state_dict: StateDict) -> None:
        engine.load_weights(state_dict.items())

    def update() -> None:
        weights.update(lambda _: weights.load_colocated(WEIGHTS, engine, load))

    for _ in range(2):
        if message is None:
            update()
        else:
            with pytest.raises(WeightUpdateError, match=message):
                update()


def test_servers_are_given_the_settings_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(updates, "RolloutServers", lambda *args: made.append(args))
    claimed: list[Any] = []
    claim = SimpleNamespace(keep=lambda: claimed.append("kept"))
    monkeypatch.setattr(updates, "Claim", lambda *args: claimed.append(args) or claim)

    class Arguments:
        output_dir = "output/run"
        rollout_timeout = 60.0
        new_special_tokens = ("<|halt|>",)

    class Client:
        def init_communicator(self, device: Any) -> None:
            made.append(device)

    client = Client()
    connect_servers(client, Arguments())
    assert claimed == [(client, "output/run"), "kept"]
    [(given, timeout, connect, tokens)] = made
    assert (given, timeout, tokens) == (client, 60.0, ("<|halt|>",))
    monkeypatch.setattr(updates, "has_accelerator", lambda: True)
    connect(client)
    assert made[1:] == [updates.get_current_device()]
