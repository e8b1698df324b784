"""A server names a faulty weight update at once, and draws nothing until one is sound (C2)."""

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

CALLS: dict[str, tuple[str, Any]] = {
    "update": ("/update_named_param/", {"name": "w", "dtype": "float32", "shape": [1]}),
    "load": ("/process_weights_after_loading/", None),
    "adapter": (
        "/update_adapter_flattened_param/",
        {"peft_config": {"r": 8, "lora_alpha": 16}, "metadatas": []},
    ),
    "reset": ("/reset_prefix_cache/", None),
    "join": ("/init_communicator/", {"host": "0.0.0.0", "port": 7, "world_size": 5}),
    "draw": ("/infer/", {"infer_requests": [request(0)]}),
}
FAULT = "weights changed implausibly: q_proj moved by 141% of its norm"
REFUSED = WeightReport(adapter_fault="vLLM refuses the adapter")
OURS = {wire.INSTANCE_HEADER: routes.INSTANCE}


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors about updates in the server's log."""
    lines: list[str] = []
    monkeypatch.setattr(other_clients.logger, "error", lines.append)
    return lines


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
        health = self.client.get("/health/")
        assert health.status_code == 200
        return str(health.json()["weights"])


def test_a_faulty_update_is_told_and_nothing_is_drawn_until_one_is_sound(said: list[str]) -> None:
    server = Updated()
    server.play("update load")
    assert server.weights() == "sound"
    server.two.weight_faults = [FAULT]
    server.play("update")
    detail = server.play("load", 409, "--rollout_mismatch warn")
    assert detail.startswith(f"The weight update has failed. replica 1: {FAULT}. Rollouts would be")
    assert said == [detail]
    assert server.weights() == detail
    assert server.play("draw", 409) == detail
    server.two.weight_faults = []
    server.play("update load draw")
    assert server.weights() == "sound"


def test_who_may_go_on(said: list[str]) -> None:
    """A training with the plugin decides itself; others go on if the server is set to warn."""
    server = Updated()
    server.one.weight_faults = [FAULT]
    server.play("update load", **OURS)
    assert FAULT in server.weights()
    server.play("draw", 409)
    server.args.rollout_mismatch = "warn"
    server.play("load draw")
    assert len(said) == 1


@pytest.mark.parametrize("call", ["reset", "draw"])
def test_what_comes_behind_an_answered_update_tells_of_it(call: str) -> None:
    """An adapter is broadcast after the server's answer; then clients reset caches, and generate.
    ms-swift's next client resets a cache after it has joined, before it sends weights."""
    server = Updated()
    server.one.reports = [REFUSED]
    server.play("adapter")
    server.play(call, 409, REFUSED.adapter_fault)
    server.play("join reset")
    server.play("adapter join reset")  # the training has ended before anybody looked


def test_weights_that_a_replica_cannot_load_are_named_until_others_come() -> None:
    server = Updated()
    server.one.faults["process_weights_after_loading"] = "raises"
    server.play("update")
    detail = server.play("load", 500, "could not load its weights")
    assert server.weights() == detail
    server.play("draw", 409)
    del server.one.faults["process_weights_after_loading"]
    server.play("update load draw")


def test_health_says_where_nothing_looked() -> None:
    """The watch of one of two replicas has ended, or that replica cannot report."""
    server = Updated()
    server.two.weight_faults = None
    server.play("update load draw")
    assert server.weights() == "not looked at"
    server.one.weight_faults = [FAULT]
    server.play("update")
    server.play("load", 409, FAULT)
    server.one.weight_faults, server.two.weight_faults = [], []
    server.play("update load")
    assert server.weights() == "sound"
    server.two.faults["read_weight_report"] = "raises"
    server.play("update load")
    assert server.weights() == "not looked at"


def test_an_update_is_judged_when_it_has_ended(said: list[str]) -> None:
    """Workers on GPUs load each part at once. Another client's request between two parts waits, at
    last with an error. Requests for health, or after the update, do not wait."""
    server = Updated()
    server.one.weight_faults = ["3 matrices were not updated"]
    for _ in range(2):
        server.play("update")
        server.play("draw", 503, "a weight update is under way")
        assert server.weights() == "sound"
    with listening(server) as url, ThreadPoolExecutor() as pool:
        draw = partial(requests.post, f"{url}/infer/", json=CALLS["draw"][1], timeout=20)
        waiting = [pool.submit(draw) for _ in range(2)]
        time.sleep(0.3)
        server.one.weight_faults = []
        loaded = requests.post(f"{url}/process_weights_after_loading/", timeout=20)
        assert loaded.status_code == 200
        assert [drawn.result().status_code for drawn in waiting] == [200, 200]
    assert said == []


@pytest.mark.parametrize("ending", ["reset", "join"])
def test_what_else_ends_an_update(ending: str) -> None:
    """Clients that do not report the end of an update reset caches; a new one joins."""
    server = Updated()
    server.play("update")
    server.play("draw", 503)
    server.play(f"{ending} draw")
