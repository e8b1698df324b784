"""The API key of `swift rollout` is never printed, and every route asks for it (F7)."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.server import api_key, routes
from swift_grpo_ext.server.api_key import MASK, VARIABLE, is_authorized, key_of, take
from tests.rig.server.served import Deployed, Replica

KEY = "k:e=y/+~._-1"


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_key, "kept_key", None)
    monkeypatch.delenv(VARIABLE, raising=False)


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


def arguments(key: str | None = None) -> Any:
    return SimpleNamespace(api_key=key, rollout_timeout=60.0, host="127.0.0.1")


def with_key(monkeypatch: pytest.MonkeyPatch, key: str = KEY) -> Any:
    monkeypatch.setenv(VARIABLE, key)
    args = arguments()
    take(args)
    return args


def test_the_key_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = with_key(monkeypatch)
    assert VARIABLE not in api_key.os.environ
    take(given)  # arguments are checked twice
    assert (given.api_key, key_of(given), key_of(arguments())) == (MASK, KEY, None)
    assert key_of(with_key(monkeypatch, "another")) == "another"


@pytest.mark.parametrize("key", [KEY, MASK])
def test_a_key_that_is_printed_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"--api_key is .* Set {VARIABLE} in") as refused:
        take(arguments(key))
    assert KEY not in str(refused.value)
    with pytest.raises(ValueError, match=f"another process has the key. Set {VARIABLE}"):
        key_of(arguments(MASK))


def test_a_key_in_a_url_is_refused() -> None:
    for sound in (None, ["http://node7:8000"]):
        api_key.check_urls(SimpleNamespace(vllm_server_base_url=sound))
    urls = SimpleNamespace(vllm_server_base_url=["http://a:1", f"http://swift:{KEY[0]}@node7:8000"])
    with pytest.raises(ValueError, match=r"holds a password for node7.*~/\.netrc") as refused:
        api_key.check_urls(urls)
    assert "@" not in str(refused.value)


WRONG = {"Authorization": basic("swift:key")}


def test_every_route_but_health_asks_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Deployed(Replica(), key=with_key(monkeypatch).api_key).client
    paths = [(r.path, method) for r in client.app.routes for method in r.methods]  # type: ignore[attr-defined]
    assert {("/infer/", "POST"), (routes.REPORTS_PATH, "GET")} <= {*paths}
    for path, method in paths:
        status = client.request(method, path, content=b"no JSON").status_code
        assert (status == 401) == (path.rstrip("/") != "/health"), path
    assert client.post("/infer/").headers["WWW-Authenticate"] == "Bearer"
    for headers, fault in (({}, "missing"), (WRONG, "not this server's")):
        refused = client.post("/infer/", headers=headers).json()["detail"]
        assert f"401 Unauthorized: the API key is {fault}. Give a training the key by" in refused
    # starlette up to 1.0.0 built `request.url` from the client's `Host`.
    for host in ("a/health?", "a/health", "/health/?x="):
        assert client.post("/infer/", headers={"Host": host}).status_code == 401
    authorized = {"Authorization": basic(f"swift:{KEY}")}
    for server, headers in ((client, authorized), (Deployed(Replica()).client, {})):
        assert server.post("/infer/", headers=headers, content=b"no JSON").status_code == 422
