"""Each request of a client without the plugin has a name and noise of its own (C1). A server names
a faulty weight update at once, and draws nothing until one is sound (C2)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.server import other_clients, routes
from tests.rig.server.served import Deployed, Replica, listening, request


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors of the server's log."""
    lines: list[str] = []
    monkeypatch.setattr(other_clients.logger, "error", lines.append)
    return lines


def asked(*words: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": word}], **fields} for word in words]


def served(deployed: Deployed, requests: list[dict[str, Any]], **config: Any) -> list[Any]:
    """Send a call; return the metadata that its requests have at the replicas, in order."""
    for replica in deployed.processes:
        replica.requests.clear()
    deployed.ask(*requests, temperature=1.0, **config)
    told = [request for replica in deployed.processes for request in replica.requests]
    return [wire.read_metadata(each["data_dict"]) for each in told]


def seeds_of(metadatas: list[Any]) -> list[int]:
    return [metadata.seed_of(k) for metadata in metadatas for k in range(metadata.count)]


def test_no_two_requests_share_a_seed_in_the_life_of_a_server() -> None:
    """Seeds of two servers differ too. Within a call, their low 32 bits differ. In engine mode the
    engine chooses; `tests/stack/test_seeds.py` has clients with seeds of their own."""
    seeds: list[int] = []
    for deployed in (Deployed(Replica(), Replica()), Deployed(Replica())):
        for _ in range(3):
            drawn = seeds_of(served(deployed, asked("a", "a", "b", "a", "c")))
            assert len({seed % 2**32 for seed in drawn}) == 5
            seeds += drawn
    assert len({*seeds}) == len(seeds) == 30
    assert min(seeds) > 0
    assert max(seeds) < 2**63
    engine = Deployed(Replica(), rollout_seed_mode="engine")
    assert seeds_of(served(engine, asked("a", "b"), seed=5)) == [None, None]


CALLS: dict[str, tuple[str, Any]] = {
    "update": ("/update_named_param/", {"name": "w", "dtype": "float32", "shape": [1]}),
    "load": ("/process_weights_after_loading/", None),
    "adapter": ("/update_adapter_flattened_param/", {"peft_config": {"r": 8}, "metadatas": []}),
    "reset": ("/reset_prefix_cache/", None),
    "join": ("/init_communicator/", {"host": "0.0.0.0", "port": 7, "world_size": 5}),
    "draw": ("/infer/", {"infer_requests": [request(0)]}),
}
FAULT = "weights changed implausibly: q_proj moved by 141% of its norm"
FAULTY, SOUND = [WeightReport(faults=[FAULT])], [WeightReport(faults=[])]


class Updated(Deployed):
    """A server with two replicas."""

    def __init__(self) -> None:
        self.one, self.two = Replica(number=0), Replica(number=1)
        super().__init__(self.one, self.two, timeout=2.0)

    def play(self, calls: str, status: int = 200, words: str = "", **headers: str) -> str:
        """Make these calls, and check that each has this status and these words in its answer;
        return the cause of the last one's refusal."""
        for name in calls.split():
            path, body = CALLS[name]
            answer = self.client.post(path, json=body, headers=headers)
            assert (answer.status_code, words in answer.text) == (status, True), (name, answer.text)
        return "" if status == 200 else str(answer.json()["detail"])

    def weights(self) -> str:
        """Return what `/health` says of the weights."""
        return str(self.client.get("/health/").json()["weights"])


def test_a_faulty_update_is_told_and_nothing_is_drawn_until_one_is_sound(said: list[str]) -> None:
    """A training with the plugin decides itself; others go on if the server is set to warn."""
    server = Updated()
    server.play("update load")
    assert server.weights() == "sound"
    server.two.reports = FAULTY
    server.play("update load", **{wire.INSTANCE_HEADER: routes.INSTANCE})
    server.play("update")
    detail = server.play("load", 409, "--rollout_mismatch warn")
    assert detail.startswith(f"The weight update has failed. replica 1: {FAULT}. Rollouts would be")
    assert said == [detail] * 2
    assert server.weights() == server.play("draw", 409) == detail
    server.args.rollout_mismatch = "warn"
    server.play("load draw")
    server.args.rollout_mismatch, server.two.reports = "stop", SOUND
    server.play("update load draw")
    assert server.weights() == "sound"


@pytest.mark.parametrize("call", ["reset", "draw"])
def test_what_comes_behind_an_answered_update_tells_of_it(call: str) -> None:
    """An adapter is broadcast after the server's answer; then clients reset caches, and generate.
    ms-swift's next client resets a cache after it has joined, before it sends weights."""
    server = Updated()
    server.one.reports = [WeightReport(adapter_fault="vLLM refuses the adapter", faults=[])]
    server.play("adapter")
    server.play(call, 409, "vLLM refuses the adapter")
    server.play("join reset")
    server.play("adapter join reset")  # the training has ended before anybody looked


def test_health_says_where_nothing_looked() -> None:
    """The watch of one of two replicas has ended, or that replica cannot report."""
    server = Updated()
    server.two.reports = [WeightReport()]
    server.play("update load draw")
    assert server.weights() == "not looked at"
    server.one.reports = FAULTY
    server.play("update")
    server.play("load", 409, FAULT)
    server.one.reports = SOUND
    server.two.faults["read_weight_report"] = "raises"
    server.play("update load")
    assert server.weights() == "not looked at"
    server.one.faults["process_weights_after_loading"] = "raises"
    assert server.play("load", 500, "could not load its weights") == server.weights()


def test_an_update_is_judged_when_it_has_ended(said: list[str]) -> None:
    """Workers on GPUs load each part at once. Another client's request between two parts waits, at
    last with an error. Requests for health, or after the update, do not wait."""
    server = Updated()
    server.one.reports = FAULTY
    server.play("update")
    server.play("draw", 503, "a weight update is under way")
    assert server.weights() == "sound"
    with listening(server) as url, ThreadPoolExecutor() as pool:
        draw = partial(requests.post, f"{url}/infer/", json=CALLS["draw"][1], timeout=20)
        waiting = [pool.submit(draw) for _ in range(2)]
        time.sleep(0.3)
        server.one.reports = SOUND
        loaded = requests.post(f"{url}/process_weights_after_loading/", timeout=20)
        assert loaded.status_code == 200
        assert [drawn.result().status_code for drawn in waiting] == [200, 200]
    # Clients that do not report the end of an update reset caches; a new one joins.
    for ending in ("reset", "join"):
        server.play("update")
        server.play(f"{ending} draw")
    assert said == []
