"""A server belongs to one training at a time, and the lease of a dead training ends (F6)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import lease, routes
from swift_grpo_ext.server.lease import OWNER_HEADER, PATH, Leaseholder
from tests.rig.server.served import Deployed, Replica, listening

GROUP = {"host": "h", "port": 1, "world_size": 2}


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    with listening(Deployed(Replica())) as address:
        yield address


def lease_of(run: str, *urls: str) -> Leaseholder:
    sessions = [requests.Session() for _ in urls]
    return Leaseholder(SimpleNamespace(sessions=sessions, base_urls=urls), run)


def connect(url: str, headers: Any = None) -> requests.Response:
    return requests.post(f"{url}/init_communicator/", json=GROUP, headers=headers, timeout=20)


def test_a_second_training_is_refused_by_the_name_of_the_first(url: str) -> None:
    """ms-swift's client connects before the training has a name."""
    first = lease_of("runs/a", url)
    assert connect(url).status_code == 200
    first.keep()
    requests.post(f"{url}{PATH}", headers=first.headers, timeout=20)
    try:
        for headers in (None, lease_of("runs/b", url).headers):
            refused = connect(url, headers)
            assert refused.status_code == 409
            assert "belongs to another training: runs/a (process " in refused.text
        assert connect(url, first.headers).status_code == 200
    finally:
        first.end()
    assert connect(url).status_code == 200


def test_a_dead_trainings_lease_ends_by_itself(url: str) -> None:
    """The next training waits for it. Its first call ends the dead one's group: replicas in that
    group would not join another."""
    requests.post(f"{url}{PATH}", headers=lease_of("runs/a").headers, timeout=20)
    assert requests.post(f"{url}/close_communicator/", timeout=20).status_code == 200
    assert connect(url).status_code == 200


def test_what_others_may_ask() -> None:
    """A client without a name may ask for facts of a server. Only the owner may change it, or use
    its replicas. Another training may do neither."""
    client = Deployed(Replica()).client
    client.post(PATH, headers={OWNER_HEADER: "runs/a"})
    changes = ("/update_named_param/", "/process_weights_after_loading/", "/infer/")
    uses = ("/get_model_state_keys/", routes.REPORTS_PATH)
    facts = ("/get_world_size/", "/get_engine_type/", "/health/")
    for path in (*changes, "/reset_prefix_cache/", *uses, *facts):
        is_read = path in (*uses, "/get_world_size/", "/health/")
        ask = partial(client.request, "GET" if is_read else "POST", path)
        assert (ask().status_code == 409) == (path not in facts), path
        other = ask(headers={OWNER_HEADER: "runs/b"})
        assert (other.status_code == 409) == (path != "/health/")
        assert ask(headers={OWNER_HEADER: "runs/a"}).status_code != 409


def test_the_names_that_all_are_told_give_nobody_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names have any alphabet. The owner's name alone neither ends the lease nor shortens a
    replica's timeout. The name of the server's start lets no replica join."""
    deployed, admitted = Deployed(Replica()), list[str]()
    monkeypatch.setattr(deployed.restarts, "admit", lambda: admitted.append("one"))
    client, holder = deployed.client, lease_of("训练/a")
    assert holder.owner.startswith("训练/a (process ")
    assert client.post(PATH).json() == {"owner": ""}
    for headers in (holder.headers, {}):
        assert client.post(PATH, headers=headers).json() == {"owner": holder.owner}
    forged = {OWNER_HEADER: holder.headers[OWNER_HEADER].partition(";")[0]}
    forged[wire.TIMEOUT_HEADER] = "1"
    for method, path in (("DELETE", PATH), ("POST", "/get_engine_type/")):
        assert client.request(method, path, headers=forged).status_code == 409, path
    named = {wire.INSTANCE_HEADER: routes.INSTANCE}
    assert client.post("/get_engine_type/", headers=named).status_code == 200
    assert admitted == []
    assert client.post("/get_engine_type/", headers=named | holder.headers).status_code == 200
    assert admitted == ["one"]
    assert client.delete(PATH, headers=holder.headers).json() == {"owner": ""}
