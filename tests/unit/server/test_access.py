"""Who may use a server. It belongs to one training at a time, and the lease of a dead training ends
(F6). Its API key is never printed, and every route asks for it (F7)."""

import base64
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import api_key, lease, routes
from swift_grpo_ext.server.api_key import MASK, VARIABLE, is_authorized, key_of, take
from swift_grpo_ext.server.lease import OWNER_HEADER, PATH, Leaseholder
from tests.rig.server.served import Deployed, Replica, listening

KEY = "k:e=y/+~._-1"


def lease_of(run: str, *urls: str) -> Leaseholder:
    sessions = [requests.Session() for _ in urls]
    return Leaseholder(SimpleNamespace(sessions=sessions, base_urls=urls), run)


def test_a_second_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift's client connects before the training has a name. A dead training's lease ends by
    itself: the next training waits for it, and ends the dead one's group, since replicas in that
    group would not join another."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    with listening(Deployed(Replica())) as url:

        def connect(headers: Any = None) -> requests.Response:
            group = {"host": "h", "port": 1, "world_size": 2}
            return requests.post(f"{url}/init_communicator/", json=group, headers=headers)

        first = lease_of("runs/a", url)
        assert connect().ok
        first.keep()
        requests.post(f"{url}{PATH}", headers=first.headers)
        for headers in (None, lease_of("runs/b", url).headers):
            refused = connect(headers)
            assert refused.status_code == 409
            assert "belongs to another training: runs/a (process " in refused.text
        assert connect(first.headers).ok
        reset = requests.post(f"{url}/reset_prefix_cache/", headers=first.headers)
        assert reset.json() == {"message": "reset_prefix_cache is done."}
        first.end()
        assert connect().ok
        requests.post(f"{url}{PATH}", headers=lease_of("runs/c").headers)
        assert requests.post(f"{url}/close_communicator/").ok
        assert connect().ok


def test_only_the_owner_uses_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without a name may ask for facts. Another training may not, even if it has learnt
    the owner's name, which has any alphabet: that neither ends the lease nor shortens a replica's
    timeout. The name of the server's start lets no replica join."""
    deployed, admitted = Deployed(Replica()), list[str]()
    monkeypatch.setattr(deployed.restarts, "admit", lambda: admitted.append("one"))
    client, holder = deployed.client, lease_of("训练/a")
    assert holder.owner.startswith("训练/a (process ")
    assert client.post(PATH).json() == {"owner": ""}
    for headers in (holder.headers, {}):
        assert client.post(PATH, headers=headers).json() == {"owner": holder.owner}
    forged = {OWNER_HEADER: holder.headers[OWNER_HEADER].partition(";")[0]}
    forged[wire.TIMEOUT_HEADER] = "1"
    assert client.delete(PATH, headers=forged).status_code == 409
    changes = ("/update_named_param/", "/process_weights_after_loading/", "/infer/")
    uses = ("/get_model_state_keys/", routes.REPORTS_PATH)
    facts = ("/get_world_size/", "/get_engine_type/", "/health/")
    for path in (*changes, "/reset_prefix_cache/", *uses, *facts):
        is_read = path in (*uses, "/get_world_size/", "/health/")
        ask = partial(client.request, "GET" if is_read else "POST", path)
        assert (ask().status_code == 409) == (path not in facts), path
        assert (ask(headers=forged).status_code == 409) == (path != "/health/")
        assert ask(headers=holder.headers).status_code != 409
    named = {wire.INSTANCE_HEADER: routes.INSTANCE}
    assert client.post("/get_engine_type/", headers=named).status_code == 200
    assert admitted == []
    assert client.post("/get_engine_type/", headers=named | holder.headers).status_code == 200
    assert admitted == ["one"]
    assert client.delete(PATH, headers=holder.headers).json() == {"owner": ""}


def basic(user_and_password: str) -> str:
    return "Basic " + base64.b64encode(user_and_password.encode()).decode()


ACCEPTED = (f"Bearer {KEY}", f"bearer {KEY}", basic(f"swift:{KEY}"), basic(f":{KEY}"))
REFUSED = (
    *("", "Bearer", "Bearer ", "Bearer key", KEY, f"Digest {KEY}", f"Bearer {KEY} "),
    *("Basic", "Basic %%%", f"Basic {KEY}", "Basic /w==", "Bearer schlüssel", "Basic schlüssel"),
    *map(basic, ("swift:", KEY, f"swift:{KEY[:-1]}", f"{KEY}:swift")),
)


@pytest.mark.parametrize("authorization", [*ACCEPTED, *REFUSED])
def test_the_key_in_a_header(authorization: str) -> None:
    assert is_authorized(authorization, KEY) == (authorization in ACCEPTED)


def with_key(monkeypatch: pytest.MonkeyPatch, key: str = KEY) -> Any:
    monkeypatch.setattr(api_key, "kept_key", None)
    monkeypatch.setenv(VARIABLE, key)
    take(args := SimpleNamespace(api_key=None))
    return args


def test_the_key_is_kept_and_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (KEY, MASK):
        with pytest.raises(ValueError, match=rf"--api_key is .* Set {VARIABLE} in") as refused:
            take(SimpleNamespace(api_key=key))
        assert KEY not in str(refused.value)
    with pytest.raises(ValueError, match=f"another process has the key. Set {VARIABLE}"):
        key_of(SimpleNamespace(api_key=MASK))
    given = with_key(monkeypatch)
    assert VARIABLE not in api_key.os.environ
    take(given)  # arguments are checked twice
    assert (given.api_key, key_of(given)) == (MASK, KEY)
    assert key_of(SimpleNamespace(api_key=None)) is None
    assert key_of(with_key(monkeypatch, "another")) == "another"


def test_every_route_but_health_asks_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Deployed(Replica(), api_key=with_key(monkeypatch).api_key).client
    paths = [(r.path, method) for r in client.app.routes for method in r.methods]  # type: ignore[attr-defined]
    assert {("/infer/", "POST"), (routes.REPORTS_PATH, "GET")} <= {*paths}
    for path, method in paths:
        status = client.request(method, path, content=b"no JSON").status_code
        assert (status == 401) == (path.rstrip("/") != "/health"), path
    assert client.post("/infer/").headers["WWW-Authenticate"] == "Bearer"
    wrong = {"Authorization": basic("swift:key")}
    for headers, fault in (({}, "missing"), (wrong, "not this server's")):
        refused = client.post("/infer/", headers=headers).json()["detail"]
        assert f"401 Unauthorized: the API key is {fault}. Give a training the key by" in refused
    # starlette up to 1.0.0 built `request.url` from the client's `Host`.
    for host in ("a/health?", "a/health", "/health/?x="):
        assert client.post("/infer/", headers={"Host": host}).status_code == 401
    authorized = {"Authorization": basic(f"swift:{KEY}")}
    for server, headers in ((client, authorized), (Deployed(Replica()).client, {})):
        assert server.post("/infer/", headers=headers, content=b"no JSON").status_code == 422
