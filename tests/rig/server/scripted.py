"""A server in memory that answers ms-swift's client by a script: what it says of itself, and its
faults."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from requests.adapters import HTTPAdapter

from swift_grpo_ext.rollout import wire
from tests.rig.server.served import drawn_by


def ours_of(replicas: int = 1, instance: str = "first start", starting: int = 0) -> dict[str, Any]:
    members = [f"{number}.0" for number in range(replicas)]
    said = {"replicas": replicas, "members": members, "starting": starting}
    return {"version": wire.VERSION, "instance": instance, **said}


@dataclass
class Server:
    """A server's description of itself, its answers, and the requests that it had."""

    ours: Any = field(default_factory=ours_of)
    fault: Any = None
    """An error of the connection, a status, or a fault of the answer."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    timeouts: list[Any] = field(default_factory=list)

    def respond(self, request: requests.PreparedRequest, timeout: Any) -> requests.Response:
        self.timeouts.append(timeout)
        response = requests.Response()
        response.status_code = 200
        content: Any = {"engine_type": "LLMEngine", **({wire.KEY: self.ours} if self.ours else {})}
        if request.path_url in ("/infer/", "/health/") and isinstance(self.fault, Exception):
            raise self.fault
        if request.path_url == "/infer/":
            content = self._infer(json.loads(request.body or ""))
            if isinstance(self.fault, int):
                response.status_code = self.fault
            if self.fault == "another":
                response.headers[wire.MESSAGE_HEADER] = "another"
        text = "Bad gateway" if content is None else json.dumps(content)
        response.raw = io.BytesIO(text.encode())
        return response

    def _infer(self, body: dict[str, Any]) -> Any:
        self.asked += body["infer_requests"]
        answers: list[Any] = []
        for one in body["infer_requests"]:
            metadata: Any = wire.read_metadata(one["data_dict"])
            answers.append({"rollout_infos": {wire.KEY: drawn_by(metadata, "replica 0")}})
        if self.fault == "nonsense":
            answers[0]["rollout_infos"][wire.KEY]["lengths"] = 7
        if isinstance(self.fault, int):
            return {"detail": "replica 1 gave no answer"}
        return {"half": answers[:-1], "no list": 7, "no JSON": None}.get(self.fault, answers)


def connect(patch: pytest.MonkeyPatch, *servers: Server) -> Any:
    """Return ms-swift's client, connected to `http://host0` and so on."""
    hosts = [f"host{number}" for number in range(len(servers))]
    by_host = dict(zip(hosts, servers, strict=True))

    def send(_: Any, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        host = str(urlsplit(request.url).netloc)
        return by_host[host].respond(request, options["timeout"])

    patch.setattr(HTTPAdapter, "send", send)
    return SimpleNamespace(
        num_servers=len(servers),
        sessions=[requests.Session() for _ in servers],
        base_urls=[f"http://{host}" for host in hosts],
        hosts=hosts,
        group_ports=list(range(len(servers))),
        pynccl_comms=[f"group {i}" for i in range(len(servers))],
        close_communicator=list,
    )
