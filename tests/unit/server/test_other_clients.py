"""Each request of a client without the plugin has a name and noise of its own (C1)."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.server import other_clients
from swift_grpo_ext.server.other_clients import OtherClients
from tests.rig.server.served import Deployed, Replica


def asked(*words: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": word}], **fields} for word in words]


def served(
    deployed: Deployed, requests: list[dict[str, Any]], **config: Any
) -> list[RequestMetadata]:
    """Send a call; return the metadata that its requests have at the replicas, in order."""
    for replica in deployed.processes:
        replica.requests.clear()
    body = {"infer_requests": requests, "request_config": {"temperature": 1.0, **config}}
    answer = deployed.client.post("/infer/", json=body)
    assert answer.status_code == 200, answer.text
    told = [request for replica in deployed.processes for request in replica.requests]
    found = [wire.read_metadata(each["data_dict"]) for each in told]
    return [metadata for metadata in found if metadata is not None]


def seeds_of(metadatas: list[RequestMetadata]) -> list[int]:
    return [metadata.seed_of(k) or 0 for metadata in metadatas for k in range(metadata.count)]


def test_no_two_requests_share_a_seed_in_the_life_of_a_server() -> None:
    """Seeds of two servers differ too. Within a call, their low 32 bits differ."""
    seeds: list[int] = []
    for _ in range(2):
        deployed = Deployed(Replica(), Replica())
        deployed.other_clients = OtherClients(gives_seeds=True)
        for _ in range(3):
            drawn = seeds_of(served(deployed, asked("a", "a", "b", "a", "c")))
            assert len({seed % 2**32 for seed in drawn}) == 5
            seeds += drawn
    assert len({*seeds}) == len(seeds) == 30
    assert min(seeds) > 0
    assert max(seeds) < 2**63


def test_a_call_is_a_round_and_its_equal_prompts_are_a_group() -> None:
    """Tools make another prompt. Other columns of a client are kept. Stops and texts are left to
    ms-swift."""
    deployed = Deployed(Replica(), Replica())
    for call in range(2):
        told = served(deployed, asked("a", "a", "b", "a"), n=3)
        ids = [metadata.sample_id for metadata in told]
        assert {(i.phase, i.step, i.number, i.turn) for i in ids} == {("train", call, 0, 0)}
        assert [(i.group, i.index) for i in ids] == [(0, 0), (0, 3), (1, 0), (0, 6)]
        assert {(m.count, m.from_other_client, m.as_arrays) for m in told} == {(3, True, False)}
        assert len({*seeds_of(told)}) == 12
    with_tools = asked("a", data_dict={"solution": "7"}, tools=[{"type": "function"}])
    told = served(deployed, [*asked("a"), *with_tools])
    assert [(m.sample_id.group, m.sample_id.index) for m in told] == [(0, 0), (1, 0)]
    assert deployed.processes[1].requests[-1]["data_dict"]["solution"] == "7"


def test_a_clients_own_seed_wins_where_it_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed for many requests is replaced, with a warning."""
    said: list[str] = []
    warn = lambda text, **_: said.append(text)  # noqa: E731
    monkeypatch.setattr(other_clients.logger, "warning_once", warn)
    deployed = Deployed(Replica(), Replica())
    assert [m.seed_of(0) for m in served(deployed, asked("a"), seed=5)] == [None]
    assert all(m.seed_of(0) for m in served(deployed, asked("a")))
    assert said == []
    told = [served(deployed, asked("a", "b"), seed=5) for _ in range(2)]
    assert len({seed for call in told for seed in seeds_of(call)}) == 4
    assert "A client gives one seed (5) for 2 requests" in said[0]


def test_engine_mode_leaves_all_seeds_alone() -> None:
    deployed = Deployed(Replica(), rollout_seed_mode="engine")
    for config in ({}, {"seed": 5}):
        assert [m.seed_of(0) for m in served(deployed, asked("a", "b"), **config)] == [None, None]
