"""A server reports the state of its last weight update in answers, in `/health`, and in its log."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests
from fastapi.testclient import TestClient

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.server import other_clients, routes
from tests.rig.server.served import Deployed, Replica, listening, request

JOIN = {"host": "0.0.0.0", "port": 7, "world_size": 5}
NAMED = {"name": "w", "dtype": "float32", "shape": [1]}
ADAPTER = {"peft_config": {"r": 8, "lora_alpha": 16}, "metadatas": []}
FAULT = "weights changed implausibly: q_proj moved by 141% of its norm"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors about updates in the server's log."""
    lines: list[str] = []
    monkeypatch.setattr(other_clients.logger, "error", lines.append)
    return lines


def asked(client: TestClient, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    answer = client.post(path, json=body, headers=headers)
    return answer.status_code, answer.json().get("detail", "") if answer.status_code > 200 else ""


def drew(client: TestClient) -> int:
    return client.post("/infer/", json={"infer_requests": [request(0)]}).status_code


def test_a_faulty_update_is_told_and_nothing_is_drawn_until_one_is_sound(said: list[str]) -> None:
    one, two = Replica(number=0), Replica(number=1)
    client = TestClient(Deployed(one, two).app)

    def update() -> tuple[int, str]:
        assert asked(client, "/update_named_param/", NAMED)[0] == 200
        return asked(client, "/process_weights_after_loading/")

    assert update() == (200, "")
    assert client.get("/health/").json()["weights"] == "sound"
    two.weight_faults = [FAULT]
    status, detail = update()
    assert status == 409
    assert detail.startswith(f"The weight update has failed. replica 1: {FAULT}. Rollouts would be")
    assert "--rollout_mismatch warn" in detail
    assert detail in said
    health = client.get("/health/")
    assert (health.status_code, health.json()["weights"]) == (200, detail)
    refused = client.post("/infer/", json={"infer_requests": [request(0)]})
    assert (refused.status_code, refused.json()["detail"]) == (409, detail)
    two.weight_faults = []
    assert update() == (200, "")
    assert (drew(client), client.get("/health/").json()["weights"]) == (200, "sound")


def test_who_may_go_on(said: list[str]) -> None:
    """A training with the plugin decides itself; others go on if the server is set to warn."""
    replica = Replica()
    replica.weight_faults = [FAULT]
    deployed = Deployed(replica)
    client = TestClient(deployed.app)
    ours = {wire.INSTANCE_HEADER: routes.INSTANCE}
    assert asked(client, "/update_named_param/", NAMED, **ours)[0] == 200
    assert asked(client, "/process_weights_after_loading/", **ours) == (200, "")
    assert FAULT in client.get("/health/").json()["weights"]
    assert drew(client) == 409
    deployed.args.rollout_mismatch = "warn"
    assert asked(client, "/process_weights_after_loading/") == (200, "")
    assert drew(client) == 200
    assert len(said) == 1


@pytest.mark.parametrize("path", ["/reset_prefix_cache/", "/infer/"])
def test_what_comes_behind_an_answered_update_tells_of_it(path: str, said: list[str]) -> None:
    """An adapter is broadcast after the server's answer; then clients reset caches, and
    generate."""
    replica = Replica()
    client = TestClient(Deployed(replica).app)
    replica.reports = [WeightReport(adapter_fault="vLLM refuses the adapter")]
    assert asked(client, "/update_adapter_flattened_param/", ADAPTER)[0] == 200
    body = {"infer_requests": [request(0)]} if path == "/infer/" else None
    status, detail = asked(client, path, body)
    assert (status, "vLLM refuses the adapter" in detail) == (409, True)


def test_a_training_begins_behind_one_that_failed(said: list[str]) -> None:
    """ms-swift's client resets a cache after it has joined, before it sends weights."""
    replica = Replica()
    client = TestClient(Deployed(replica).app)
    replica.reports = [WeightReport(adapter_fault="vLLM refuses the adapter")]
    for announces in (False, True):  # the last one may have ended before anybody looked
        assert asked(client, "/update_adapter_flattened_param/", ADAPTER)[0] == 200
        assert announces or drew(client) == 409
        assert client.post("/init_communicator/", json=JOIN).status_code == 200
        assert asked(client, "/reset_mm_cache/") == (200, "")


def test_weights_that_a_replica_cannot_load_are_named_until_others_come(said: list[str]) -> None:
    replica = Replica()
    client = TestClient(Deployed(replica).app)
    assert asked(client, "/update_named_param/", NAMED)[0] == 200
    replica.faults["process_weights_after_loading"] = "raises"
    status, detail = asked(client, "/process_weights_after_loading/")
    assert (status, "could not load its weights" in detail) == (500, True)
    assert client.get("/health/").json()["weights"] == detail
    assert drew(client) == 409
    del replica.faults["process_weights_after_loading"]
    assert asked(client, "/update_named_param/", NAMED)[0] == 200
    assert asked(client, "/process_weights_after_loading/") == (200, "")
    assert drew(client) == 200


def test_health_says_where_nothing_looked(said: list[str]) -> None:
    """The watch of one of two replicas has ended, or that replica cannot report."""
    one, two = Replica(number=0), Replica(number=1)
    client = TestClient(Deployed(one, two).app)

    def update() -> tuple[str, str]:
        assert asked(client, "/update_named_param/", NAMED)[0] == 200
        answer = asked(client, "/process_weights_after_loading/")[1]
        return answer, client.get("/health/").json()["weights"]

    assert update() == ("", "sound")
    two.weight_faults = None
    assert update() == ("", "not looked at")
    assert drew(client) == 200
    one.weight_faults = [FAULT]
    assert all(FAULT in told for told in update())
    one.weight_faults, two.weight_faults = [], []
    assert update() == ("", "sound")
    two.faults["read_weight_report"] = "raises"
    assert update() == ("", "not looked at")


def test_an_update_is_judged_when_it_has_ended(said: list[str]) -> None:
    """Workers on GPUs load each part at once. Another client's request between two parts waits, at
    last with an error. Requests for health, or after the update, do not wait."""
    replica = Replica()
    with listening(Deployed(replica, timeout=2.0)) as url:

        def post(path: str, body: Any = None, **kwargs: Any) -> requests.Response:
            return requests.post(url + path, json=body, timeout=20, **kwargs)

        draw = partial(post, "/infer/", {"infer_requests": [request(0)]})
        replica.weight_faults = ["3 matrices were not updated"]
        for _ in range(2):
            assert post("/update_named_param/", NAMED).status_code == 200
            told = draw()
            assert (told.status_code, told.headers["Retry-After"]) == (503, "1")
            assert "a weight update is under way" in told.json()["detail"]
            assert requests.get(f"{url}/health/", timeout=20).json()["weights"] == "sound"
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(draw) for _ in range(2)]
            time.sleep(0.3)
            replica.weight_faults = []
            assert post("/process_weights_after_loading/").status_code == 200
            assert [drawn.result().status_code for drawn in waiting] == [200, 200]
        assert draw().status_code == 200
    assert said == []


@pytest.mark.parametrize("ending", ["/reset_prefix_cache/", "/init_communicator/"])
def test_what_else_ends_an_update(ending: str, said: list[str]) -> None:
    """Clients that do not report the end of an update reset caches; a new one joins."""
    client = TestClient(Deployed(Replica(), timeout=2.0).app)
    assert asked(client, "/update_named_param/", NAMED)[0] == 200
    assert drew(client) == 503
    body = JOIN if "init" in ending else None
    assert client.post(ending, json=body).status_code == 200
    assert drew(client) == 200
