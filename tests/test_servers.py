"""The trainer's side of `swift rollout`, against servers that answer over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest

from swift_grpo_ext import wire
from swift_grpo_ext.seeding import Place
from swift_grpo_ext.servers import RolloutServers
from swift_grpo_ext.wire import Completion, Envelope, WireError


@dataclass
class Server:
    """What a server says of itself, and what it was asked."""

    ours: Any = field(default_factory=lambda: {"version": wire.VERSION, "replicas": 1})
    status: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: Any) -> Any:
        if path == "/get_engine_type/":
            return {"engine_type": "LLMEngine", **({wire.KEY: self.ours} if self.ours else {})}
        self.asked += body["infer_requests"]
        return [self._draw(request) for request in body["infer_requests"]]

    def _draw(self, request: dict[str, Any]) -> dict[str, Any]:
        envelope = wire.read_envelope(request["data_dict"])
        assert envelope is not None
        group = envelope.place.group
        drawn = [
            Completion(text=f"{group}.{k}", token_ids=[group, k], logprobs=None, finish_reason=None)
            for k in range(envelope.count)
        ]
        return {"rollout_infos": {wire.KEY: wire.pack_answer(drawn, [1, 2], "replica 0")}}


@contextmanager
def running(*servers: Server) -> Iterator[Any]:
    """What is read of ms-swift's client, connected to these servers."""
    hosts = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(server)) for server in servers]
    for server, host in zip(servers, hosts, strict=True):
        server.url = f"http://127.0.0.1:{host.server_port}"
        Thread(target=host.serve_forever, daemon=True).start()
    sessions = [requests.Session() for _ in servers]
    yield SimpleNamespace(sessions=sessions, base_urls=[server.url for server in servers])
    for host in hosts:
        host.shutdown()
        host.server_close()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = json.dumps(server.answer(self.path, json.loads(body or "null"))).encode()
            failed = self.path == "/infer/" and server.status != 200
            self.send_response(server.status if failed else 200)
            self.end_headers()
            self.wfile.write(b'{"detail": "replica 1 gave no answer"}' if failed else answer)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def ask(servers: RolloutServers, num_groups: int, count: int = 4) -> list[Any]:
    asked, envelopes = [], []
    for group in range(num_groups):
        place = Place(phase="train", step=0, number=0, group=group, index=0)
        envelopes.append(Envelope(place=place, count=count, run_seed=42, lean=True))
        asked.append(RolloutInferRequest(messages=[{"role": "user", "content": "?" * group}]))
        wire.write_envelope(asked[-1].data_dict, envelopes[-1])
    return servers.infer(asked, envelopes, RequestConfig(max_tokens=8))


def test_samples_come_back_to_their_requests() -> None:
    small, large = Server(), Server(ours={"version": wire.VERSION, "replicas": 2})
    with running(small, large) as client:
        servers = RolloutServers(client)
        answers = ask(servers, 9)
    assert servers.replicas == [1, 2]
    assert [[c.text for c in cs] for cs, _ in answers] == [
        [f"{group}.{k}" for k in range(4)] for group in range(9)
    ]
    assert all(prompt_ids == [1, 2] for _, prompt_ids in answers)
    assert (len(small.asked), len(large.asked)) == (3, 6)
    for completions, _ in answers:
        seeds = [c.seed for c in completions]
        assert seeds == list(range(seeds[0], seeds[0] + 4))
        assert {c.replica for c in completions} <= {
            f"server 0 ({small.url}) replica 0",
            f"server 1 ({large.url}) replica 0",
        }


def test_fewer_requests_than_servers() -> None:
    with running(Server(), Server(), Server()) as client:
        assert len(ask(RolloutServers(client), 1)) == 1
        assert ask(RolloutServers(client), 0) == []


def test_a_server_without_the_plugin_is_refused_with_the_remedy() -> None:
    with (
        running(Server(), Server(ours=None)) as client,
        pytest.raises(WireError, match=r"server 1 .*runs without swift-grpo-ext: start it with"),
    ):
        RolloutServers(client)


def test_a_server_of_another_version_is_refused() -> None:
    with (
        running(Server(ours={"version": 99, "replicas": 1})) as client,
        pytest.raises(WireError, match=r"server 0 .*speaks version 99 .*load the same version"),
    ):
        RolloutServers(client)


def test_a_servers_error_names_it_and_the_cause() -> None:
    failing = Server(status=500)
    with running(failing) as client:
        servers = RolloutServers(client)
        with pytest.raises(RuntimeError, match=r"server 0 .*answered 500: .*replica 1 gave no"):
            ask(servers, 2)
