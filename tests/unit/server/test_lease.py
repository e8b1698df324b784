"""A server belongs to one training at a time; the lease of a dead training ends (F6)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from fastapi.testclient import TestClient

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import lease
from swift_grpo_ext.server.lease import OWNER_HEADER, PATH, Leaseholder
from swift_grpo_ext.server.routes import REPORTS_PATH
from tests.rig.server.served import Deployed, Replica, listening

GROUP = {"host": "h", "port": 1, "world_size": 2}
MESSAGE = "this server belongs to another training: runs/a"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    with listening(Deployed(Replica())) as address:
        yield address


def lease_of(url: str, run: str) -> Leaseholder:
    return Leaseholder(SimpleNamespace(sessions=[requests.Session()], base_urls=[url]), run)


def connect(url: str, headers: Any = None) -> requests.Response:
    return requests.post(f"{url}/init_communicator/", json=GROUP, headers=headers, timeout=20)


def test_a_second_training_is_refused_by_the_name_of_the_first(url: str) -> None:
    """ms-swift's client connects before the training has a name."""
    first = lease_of(url, "runs/a")
    assert connect(url).status_code == 200
    first.keep()
    requests.post(f"{url}{PATH}", headers=first.headers, timeout=20)
    try:
        for headers in (None, lease_of(url, "runs/b").headers):
            refused = connect(url, headers)
            assert (refused.status_code, MESSAGE in refused.text) == (409, True)
        assert "process" in refused.text
        assert connect(url, first.headers).status_code == 200
    finally:
        first.end()
    assert connect(url).status_code == 200


def test_a_dead_trainings_lease_ends_by_itself(url: str) -> None:
    """The next training waits for it. Its first call ends the dead one's group: replicas in that
    group would not join another."""
    requests.post(f"{url}{PATH}", headers=lease_of(url, "runs/a").headers, timeout=20)
    assert requests.post(f"{url}/update_named_param/", timeout=20).status_code == 409
    assert requests.post(f"{url}/close_communicator/", timeout=20).status_code == 200
    assert connect(url).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        ("POST", "/update_named_param/", True),
        ("POST", "/process_weights_after_loading/", True),
        ("POST", "/infer/", True),
        ("POST", "/reset_prefix_cache/", True),
        ("GET", "/get_model_state_keys/", True),
        ("GET", REPORTS_PATH, True),
        ("GET", "/get_world_size/", False),
        ("POST", "/get_engine_type/", False),
        ("GET", "/health/", False),
    ],
)
def test_what_others_may_ask(method: str, path: str, refused: bool) -> None:
    """A client without a name may ask for facts of a server. Only the owner may change it, or use
    its replicas. Another training may do neither."""
    client = TestClient(Deployed(Replica()).app)
    client.post(PATH, headers={OWNER_HEADER: "runs/a"})
    status = client.request(method, path).status_code
    assert (status == 409) == refused
    other = client.request(method, path, headers={OWNER_HEADER: "runs/b"})
    assert (other.status_code == 409) == (path != "/health/")
    own = client.request(method, path, headers={OWNER_HEADER: "runs/a"})
    assert own.status_code != 409


def test_the_name_that_all_are_told_gives_nobody_the_server() -> None:
    """The name alone neither ends the lease nor shortens a replica's timeout."""
    client = TestClient(Deployed(Replica()).app)
    holder = Leaseholder(SimpleNamespace(sessions=[], base_urls=[]), "runs/a")
    client.post(PATH, headers=holder.headers)
    told = client.post(PATH).json()["owner"]
    assert told == holder.owner
    forged = {OWNER_HEADER: told, wire.TIMEOUT_HEADER: "1"}
    for method, path in (("DELETE", PATH), ("POST", "/infer/"), ("POST", "/get_engine_type/")):
        assert client.request(method, path, headers=forged).status_code == 409, path
    assert client.post(PATH).json() == {"owner": told}


def test_names_of_any_alphabet_are_told() -> None:
    client = TestClient(Deployed(Replica()).app)
    assert client.post(PATH).json() == {"owner": ""}
    holder = Leaseholder(SimpleNamespace(sessions=[], base_urls=[]), "训练/a")
    assert client.post(PATH, headers=holder.headers).json() == {"owner": holder.owner}
    assert holder.owner.startswith("训练/a (process ")
    assert client.delete(PATH, headers=holder.headers).json() == {"owner": ""}
