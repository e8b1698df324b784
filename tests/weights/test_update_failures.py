"""A weight update that fails somewhere: in order, in time, and on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.weights import updates
from swift_grpo_ext.weights.checksums import WeightChecksums, weight_checksums
from swift_grpo_ext.weights.updates import WeightUpdates
from tests.ranks import Gather, run_ranks
from tests.upstream.test_weight_sync import put_back

WEIGHTS = {"a": torch.arange(3.0), "b": torch.ones(2)}


class Servers:
    """Records what is called, and loads what was sent."""

    def __init__(self, **failures: Exception) -> None:
        self.calls: list[str] = []
        self.loaded: WeightChecksums = {}
        self._failures = failures

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self._failures:
            raise self._failures[name]

    def bounded(self) -> Any:
        return nullcontext()

    def reconnect(self, *, again: bool) -> bool:
        self._call("reconnect again" if again else "reconnect")
        return again

    def load(self, state_dict: dict[str, torch.Tensor]) -> None:
        self._call("load")
        self.loaded |= weight_checksums(state_dict.items())

    def loaded_checksums(self) -> list[tuple[str, WeightChecksums]]:
        self._call("loaded_checksums")
        return [("worker 0 of server 0", self.loaded), ("worker 1 of server 0", self.loaded)]


class Ranks:
    drives_engine = True

    def __init__(self, rank: int, gather: Gather) -> None:
        self.rank, self.all_gather = rank, gather


def update_on_ranks(
    servers: Servers, move: Callable[[WeightUpdates, int], None], world_size: int = 2
) -> list[str]:
    """What the update raised on each rank; rank 0 has the servers."""

    def work(rank: int, gather: Gather) -> str:
        ranks: Any = Ranks(rank, gather)
        held: Any = servers if rank == 0 else None
        weights = WeightUpdates(ranks, held)
        try:
            weights.update(lambda _: move(weights, rank))
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return ""

    return run_ranks(world_size, work)


def test_a_worker_that_holds_something_else_is_named_on_every_rank() -> None:
    servers = Servers()

    def move(weights: WeightUpdates, rank: int) -> None:
        if rank == 0:
            weights.send(WEIGHTS, servers.load)
            servers.loaded["b"] = "float32 (2,) 00"

    first, second = update_on_ranks(servers, move)
    assert first.startswith("WeightUpdateError: worker 0 of server 0 does not hold")
    assert "1 arrived changed (b)" in first
    assert second == f"WeightUpdateError: The weight update failed on rank 0: {first}"


def test_without_servers_no_rank_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree before the first of them gathers weights, where others would wait for it."""
    logged: list[str] = []
    monkeypatch.setattr(updates.logger, "error", logged.append)
    moved: list[int] = []
    servers = Servers(reconnect=ConnectionError("server 0 is gone"))
    first, second = update_on_ranks(servers, lambda weights, rank: moved.append(rank))
    assert moved == []
    assert first == "ConnectionError: server 0 is gone"
    assert second == f"WeightUpdateError: The weight update failed on rank 0: {first}"
    assert logged == [f"The weight update failed on rank 0: {first}"]


def test_after_a_failure_rank_0_still_gathers_with_the_others() -> None:
    """In both tries."""
    servers = Servers(load=ConnectionError("reset"))
    gathered: list[tuple[int, int]] = []

    def move(weights: WeightUpdates, rank: int) -> None:
        for part in range(3):
            gathered.append((rank, part))
            weights.send(WEIGHTS, servers.load if rank == 0 else lambda _: None)

    first, second = update_on_ranks(servers, move)
    assert sorted(gathered) == sorted(2 * [(rank, part) for rank in range(2) for part in range(3)])
    assert servers.calls == ["reconnect", "load", "reconnect again", "load"]
    assert (first, "failed on rank 0: ConnectionError: reset" in second) == (
        "ConnectionError: reset",
        True,
    )


def test_an_update_that_was_not_sent_is_made_once_more() -> None:
    """With all weights, on all ranks, and with the base of adapters where a group is new."""
    servers = Servers(load=ConnectionError("reset"))
    moves: list[tuple[int, bool]] = []

    def work(rank: int, gather: Gather) -> None:
        ranks: Any = Ranks(rank, gather)
        held: Any = servers if rank == 0 else None
        weights = WeightUpdates(ranks, held)

        def move(made_anew: bool) -> None:
            moves.append((rank, made_anew))
            weights.send(WEIGHTS, servers.load if rank == 0 else lambda _: None)
            if rank == 0:
                servers._failures.clear()

        weights.update(move)

    run_ranks(2, work)
    assert sorted(moves) == [(0, False), (0, True), (1, False), (1, True)]
    assert servers.calls == ["reconnect", "load", "reconnect again", "load", "loaded_checksums"]


def test_what_a_rank_cannot_make_is_not_made_again() -> None:
    servers = Servers()

    def move(weights: WeightUpdates, rank: int) -> None:
        weights.send(WEIGHTS, servers.load if rank == 0 else lambda _: None)
        if rank == 1:
            raise MemoryError("of rank 1")

    first, second = update_on_ranks(servers, move)
    assert second == "MemoryError: of rank 1"
    assert first == f"WeightUpdateError: The weight update failed on rank 1: {second}"
    assert servers.calls.count("load") == 1


def test_each_update_begins_anew() -> None:
    servers: Any = Servers()
    weights = WeightUpdates(SingleRank(), servers)
    with pytest.raises(ValueError, match="once"):
        weights.update(lambda _: (_ for _ in ()).throw(ValueError("once")))
    weights.update(lambda _: weights.send(WEIGHTS, servers.load))
    servers.loaded = {}
    weights.update(lambda _: weights.send({"a": WEIGHTS["a"]}, servers.load))  # `b` is not missed


def test_each_wait_of_a_group_has_the_bound_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would wait 300 s for a server that does not come."""
    from swift.rlhf_trainers import vllm_client

    made: list[Any] = []

    class Group:
        @staticmethod
        def create(*args: Any, **kwargs: Any) -> Any:
            made.append((args, kwargs))
            return SimpleNamespace(rank=1, world_size=2, barrier=dict)

    def init_communicator(device: Any) -> None:
        group = vllm_client.StatelessProcessGroup.create("host", 7)
        client.pynccl_comms = [SimpleNamespace(group=group)]

    monkeypatch.setattr(vllm_client, "StatelessProcessGroup", Group)
    monkeypatch.setattr(updates, "has_accelerator", lambda: False)
    put_back(monkeypatch)
    client = SimpleNamespace(init_communicator=init_communicator)
    updates._connect(client, 12.5)
    assert made == [(("host", 7), {"store_timeout": 12})]
    assert vllm_client.StatelessProcessGroup is Group
    [communicator] = client.pynccl_comms
    assert communicator._timeout.total_seconds() == 12.5
    assert (communicator.rank, communicator.world_size) == (1, 2)
    assert communicator.group.barrier() == {"timeout": 12.5}
