"""The trainer's client of `swift rollout`, with servers in memory. `test_server.py` and
`test_fault_matrix.py` use real HTTP."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import torch
from requests.adapters import HTTPAdapter
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers import vllm_client
from urllib3.exceptions import MaxRetryError, NewConnectionError, ReadTimeoutError

from swift_grpo_ext.ranks import RolloutError
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import Prompt, WireError
from swift_grpo_ext.server import client as servers_module
from swift_grpo_ext.server.client import RolloutServers, connect_servers
from swift_grpo_ext.server.lease import Leaseholder
from tests.rig.server.served import drawn_by, request

TIMEOUT = 60.0  # seconds
MakeClient = Callable[..., Any]
SEND = HTTPAdapter.send


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
        answer: Any = {"engine_type": "LLMEngine", **({wire.KEY: self.ours} if self.ours else {})}
        if request.path_url == "/health/" and isinstance(self.fault, Exception):
            raise self.fault
        if request.path_url == "/infer/":
            answer = self._infer(response, json.loads(request.body or ""))
        content = b"Bad gateway" if answer is None else json.dumps(answer).encode()
        response.raw = io.BytesIO(content)
        return response

    def _infer(self, response: requests.Response, body: dict[str, Any]) -> Any:
        self.asked += body["infer_requests"]
        if isinstance(self.fault, Exception):
            raise self.fault
        if isinstance(self.fault, int):
            response.status_code = self.fault
            return {"detail": "replica 1 gave no answer"}
        if self.fault == "another":
            response.headers[wire.MESSAGE_HEADER] = "another"
        metadatas: list[Any] = [wire.read_metadata(r["data_dict"]) for r in body["infer_requests"]]
        answers: list[Any] = [
            {"rollout_infos": {wire.KEY: drawn_by(metadata, "replica 0")}} for metadata in metadatas
        ]
        if self.fault == "nonsense":
            answers[0]["rollout_infos"][wire.KEY]["lengths"] = 7
        whole = {"half": answers[:-1], "no list": 7, "no JSON": None}
        return whole.get(self.fault, answers)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> MakeClient:
    """A function that makes ms-swift's client, connected to `http://host0` and so on."""

    def make(*servers: Server) -> Any:
        hosts = [f"host{number}" for number in range(len(servers))]
        by_host = dict(zip(hosts, servers, strict=True))

        def send(_: Any, request: requests.PreparedRequest, **options: Any) -> requests.Response:
            host = str(urlsplit(request.url).netloc)
            return by_host[host].respond(request, options["timeout"])

        monkeypatch.setattr(HTTPAdapter, "send", send)
        return SimpleNamespace(
            num_servers=len(servers),
            sessions=[requests.Session() for _ in servers],
            base_urls=[f"http://{host}" for host in hosts],
            hosts=hosts,
            group_ports=list(range(len(servers))),
            pynccl_comms=[f"group {i}" for i in range(len(servers))],
            close_communicator=list,
        )

    return make


def counts_of(servers: RolloutServers) -> list[int]:
    """Return how many replicas each server has."""
    return [server.replicas for server in servers._used()]


def ask(servers: RolloutServers, num_groups: int) -> list[Any]:
    asked = [RolloutInferRequest(**request(group)) for group in range(num_groups)]
    metadatas: list[Any] = [wire.read_metadata(one.data_dict) for one in asked]
    return servers.infer(asked, metadatas, RequestConfig(max_tokens=8))


def test_samples_come_back_to_their_requests(connected: MakeClient) -> None:
    small, large = Server(), Server(ours=ours_of(2))
    servers = RolloutServers(connected(small, large), TIMEOUT)
    answers = ask(servers, 9)
    assert counts_of(servers) == [1, 2]
    assert [[c.text for c in cs] for cs, _ in answers] == [
        [f"{group}.{k}" for k in range(4)] for group in range(9)
    ]
    assert all(prompt == Prompt([1, 2]) for _, prompt in answers)
    assert (len(small.asked), len(large.asked)) == (3, 6)
    for completions, _ in answers:
        seeds = [c.seed for c in completions]
        assert seeds == list(range(seeds[0], seeds[0] + 4))
    assert {c.replica for completions, _ in answers for c in completions} == {
        "server 0 (http://host0) replica 0",
        "server 1 (http://host1) replica 0",
    }


def test_the_shortest_engine_bounds_prompts(connected: MakeClient) -> None:
    lengths = (1024, 512, None)  # None: an older release does not report it
    facts = [{"max_model_len": n, "number_bits": n and n // 32} for n in lengths]
    of_servers = [Server(ours=ours_of() | fact) for fact in facts]
    servers = RolloutServers(connected(*of_servers), TIMEOUT)
    assert (servers.max_model_len, servers.number_bits) == (512, 16)
    unknown = RolloutServers(connected(Server()), TIMEOUT)
    assert (unknown.max_model_len, unknown.number_bits) == (None, None)


TOKENS = ours_of() | {"new_special_tokens": ["<b>"]}


@pytest.mark.parametrize(
    ("ours", "tokens", "error", "message"),
    [
        (None, (), WireError, r"runs without swift-grpo-ext: start it with"),
        (
            {"version": 99, "replicas": 1},
            (),
            WireError,
            "speaks version 99 .*load the same version",
        ),
        (TOKENS, (), ValueError, r"was started with --new_special_tokens <b>, this .* \(none\)"),
        (ours_of(), ["<a>"], ValueError, r" \(none\), this training with <a>: the same ids"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(
    ours: Any, tokens: Sequence[str], error: type[Exception], message: str, connected: MakeClient
) -> None:
    client = connected(Server(ours=ours))
    with pytest.raises(error, match=rf"^server 0 .*{message}"):
        RolloutServers(client, TIMEOUT, new_special_tokens=tokens)


@pytest.mark.parametrize(
    ("fault", "error", "is_lost"),
    [
        (requests.ConnectionError("cut"), r"does not answer \(ConnectionError: cut", True),
        (requests.ReadTimeout("late"), r"does not answer \(ReadTimeout: late", True),
        ("another", r"gave the answer to another request\.", True),
        (503, "answered 503: .*replica 1 gave no answer", True),
        (500, "answered 500: .*replica 1 gave no answer", False),
        ("no JSON", "answered with no JSON", False),
        ("no list", "gave an answer that makes no sense", False),
        ("half", "gave an answer that makes no sense", False),
        ("nonsense", "gave an answer that makes no sense", False),
    ],
)
def test_what_one_server_cannot_answer_another_does(
    fault: Any, error: str, is_lost: bool, connected: MakeClient
) -> None:
    """Without another server, the error names this one and the cause."""
    with pytest.raises(RolloutError, match=rf"^server 0 \(http://host0\) {error}"):
        ask(RolloutServers(connected(Server(fault=fault)), TIMEOUT), 2)
    client = connected(Server(fault=fault), Server())
    servers = RolloutServers(client, TIMEOUT)
    answers = ask(servers, 4)
    assert [[c.text for c in cs] for cs, _ in answers] == [
        [f"{group}.{k}" for k in range(4)] for group in range(4)
    ]
    # From now on only the other one gets weights; its name does not change.
    assert client.pynccl_comms == ["group 0", "group 1"][is_lost:]
    assert client.num_servers == len(client.sessions) == 2 - is_lost
    if is_lost:
        completions, _ = ask(servers, 1)[0]
        assert {c.replica for c in completions} == {"server 1 (http://host1) replica 0"}


def test_servers_are_connected_again_where_they_changed(
    connected: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers are connected again after they lost replicas, after a restart, and after a failed
    update."""
    other, server = Server(), Server(ours=ours_of(2))
    client = connected(other, server)
    made: list[Any] = []

    def connect(alone: Any, timeout: float) -> None:
        assert timeout == TIMEOUT
        made.append((alone.num_servers, alone.base_urls, alone.hosts, alone.group_ports))
        alone.pynccl_comms = ["a new group"]

    monkeypatch.setattr(servers_module, "connect", connect)
    servers = RolloutServers(client, TIMEOUT)
    assert client.sessions[1].headers[wire.INSTANCE_HEADER] == "first start"
    assert (servers.reconnect(), made) == (False, [])
    said: list[str] = []
    monkeypatch.setattr(servers_module.logger, "warning", said.append)
    for ours in (ours_of(1), ours_of(1, "second start")):
        server.ours = ours
        assert servers.reconnect()
        what = "was restarted" if ours["instance"] == "second start" else "has reconnected"
        assert f"{what}; " in said.pop()
        assert made.pop() == (1, ["http://host1"], ["host1"], [1])
        assert client.pynccl_comms == ["group 0", "a new group"]
        assert client.sessions[1].headers[wire.INSTANCE_HEADER] == ours["instance"]
        assert counts_of(servers) == [1, 1]
        assert not servers.reconnect()
    assert servers.reconnect(again=True)
    assert [urls for _, urls, _, _ in made] == [["http://host0"], ["http://host1"]]
    ask(servers, 8)
    assert (len(other.asked), len(server.asked)) == (4, 4)


def test_a_group_that_cannot_be_made_is_tried_thrice(
    connected: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    said: list[str] = []

    def connect(alone: Any, _: float) -> None:
        tried.extend(alone.base_urls)
        raise TimeoutError("no answer")

    monkeypatch.setattr(servers_module, "connect", connect)
    monkeypatch.setattr(servers_module.logger, "warning", said.append)
    servers = RolloutServers(connected(Server(), Server()), TIMEOUT)
    with pytest.raises(RolloutError, match=r"server 1 .*group was not made \(no answer\)"):
        servers.reconnect(again=True)
    assert tried == ["http://host0"] * 3 + ["http://host1"] * 3
    failed = "server 0 (http://host0): the weights' group was not made (no answer)."
    assert said[1] == f"{failed} It is tried again."
    assert said[5] == f"{failed} Retrying on the remaining servers."


class Clock:
    """Stands for `time`: a pause is over at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_replicas_that_are_being_started_are_waited_for(
    connected: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits within the timeout if the server has no other replica."""
    server, clock = Server(), Clock()
    monkeypatch.setattr(servers_module, "time", clock)
    monkeypatch.setattr(servers_module, "SECONDS_BETWEEN_LOOKS", 0.5)
    monkeypatch.setattr(
        servers_module, "connect", lambda alone, _: vars(alone).update(pynccl_comms=["new"])
    )
    servers = RolloutServers(connected(server), 1.2)
    server.ours = ours_of(0, starting=1)
    with pytest.raises(RolloutError, match=r"server 0 .*has no replica left"):
        servers.reconnect()
    assert clock.now == 1.5

    def sleep(seconds: float) -> None:
        server.ours = ours_of(1, "second start")

    clock.sleep = sleep  # type: ignore[method-assign]
    assert servers.reconnect()
    assert counts_of(servers) == [1]


def test_a_lost_server_leaves_the_other_its_own_group_and_name(
    connected: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is lost between rounds: weights and requests go to the other one. When it answers
    again, the next weight update takes it back, with a group of its own."""
    lost, healthy = Server(ours=ours_of(3)), Server(ours=ours_of(2, "second"))
    client = connected(lost, healthy)
    monkeypatch.setattr(
        servers_module, "connect", lambda alone, _: vars(alone).update(pynccl_comms=["new"])
    )
    servers = RolloutServers(client, TIMEOUT)
    lost.ours = ours_of(0)
    for fault in (None, requests.ConnectionError("refused")):
        lost.fault = fault
        assert not servers.reconnect()
        assert (client.base_urls, client.num_servers) == (["http://host1"], 1)
        assert (client.hosts, client.group_ports) == (["host1"], [1])
        assert client.pynccl_comms == ["group 1"]
        assert client.sessions[0].headers[wire.INSTANCE_HEADER] == "second"
        assert counts_of(servers) == [2]
    lost.fault, lost.ours = None, ours_of(1)
    assert servers.reconnect()
    assert client.base_urls == ["http://host0", "http://host1"]
    assert client.group_ports == [0, 1]
    assert client.pynccl_comms == ["new", "group 1"]
    assert counts_of(servers) == [1, 2]


@pytest.mark.parametrize(
    ("path", "num_tries"), [("infer/", 2), ("get_engine_type/", 2), ("init_communicator/", 1)]
)
def test_only_what_may_be_repeated_is_sent_again(
    path: str, num_tries: int, connected: MakeClient
) -> None:
    """The connection breaks before the answer."""
    client, tries = connected(Server()), list[int]()
    RolloutServers(client, TIMEOUT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def cut() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(2**16)
                    tries.append(1)
                    connection.close()

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        adapter = client.sessions[0].get_adapter(f"http://host0/{path}")
        port = listener.getsockname()[1]
        request = requests.Request("POST", f"http://127.0.0.1:{port}/{path}").prepare()
        with pytest.raises(requests.ConnectionError):
            SEND(adapter, request, timeout=10)
    assert len(tries) == num_tries


@pytest.mark.parametrize("path", ["infer/", "init_communicator/"])
def test_connections_are_tried_and_busy_servers_asked_again(
    path: str, connected: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected(Server())
    RolloutServers(client, TIMEOUT)
    tries = client.sessions[0].get_adapter(f"http://host0/{path}").max_retries
    refused = NewConnectionError(None, "refused")  # type: ignore[arg-type]
    for _ in range(6):
        tries = tries.increment("POST", f"/{path}", error=refused)
    with pytest.raises(MaxRetryError):
        tries.increment("POST", f"/{path}", error=refused)
    late = ReadTimeoutError(None, "", "late")  # type: ignore[arg-type]
    with pytest.raises(ReadTimeoutError):
        tries.increment("POST", f"/{path}", error=late)
    assert servers_module.TRIES.is_retry("POST", 503, has_retry_after=True)
    assert not servers_module.TRIES.is_retry("POST", 503)
    assert not servers_module.TRIES.is_retry("POST", 500, has_retry_after=True)


def test_the_callers_fault_is_tried_nowhere_else(connected: MakeClient) -> None:
    healthy = Server()
    client = connected(Server(fault=400), healthy)
    refused = r"server 0 .* refused the request \(400\): .*gave no"
    with pytest.raises(RolloutError, match=refused):
        ask(RolloutServers(client, TIMEOUT), 1)
    assert client.num_servers == 2
    assert healthy.asked == []


def test_a_row_that_json_cannot_hold_is_named(connected: MakeClient) -> None:
    servers = RolloutServers(connected(Server()), TIMEOUT)
    metadata: Any = wire.read_metadata(request(2)["data_dict"])
    row = RolloutInferRequest(messages=[], data_dict={"answer": float("nan")})
    message = r"round 0\.0, group 2, sample 0: the row cannot be sent .*Mend"
    with pytest.raises(RolloutError, match=message):
        servers.infer([row], [metadata], RequestConfig())


def test_bounds_grow_outwards(connected: MakeClient) -> None:
    """With one flag on both sides the trainer outlasts its server (F2)."""
    assert 1.0 < 2.0 < wire.SERVER_TIMEOUTS < wire.TRAINER_TIMEOUTS
    client = connected(server := Server())
    RolloutServers(client, 7.5)
    [session] = client.sessions
    assert session.headers[wire.TIMEOUT_HEADER] == "7.5"
    session.get("http://host0/health/")
    assert [seconds for _, seconds in server.timeouts] == pytest.approx([22.5, 22.5], abs=0.5)


def test_each_wait_of_a_group_has_the_bound_of_the_flag(
    connected: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would wait 300 s for a server that does not come."""
    waits: list[Any] = []
    monkeypatch.setattr(
        servers_module,
        "bounded_rendezvous",
        lambda module, timeout: nullcontext(waits.append((module, timeout))),
    )
    monkeypatch.setattr(Leaseholder, "keep", lambda self: waits.append(self.owner))
    args: Any = SimpleNamespace(
        output_dir="run", rollout_timeout=12.5, new_special_tokens=[], full_determinism=False
    )
    group: Any = SimpleNamespace(rank=1, world_size=2)

    class Client(SimpleNamespace):
        def init_communicator(self, device: Any) -> None:
            waits.append(torch.device(device).type)
            self.pynccl_comms = [SimpleNamespace(group=group)]

    client: Any = Client(**vars(connected(Server())))
    servers = connect_servers(client, args)
    assert servers.reconnect(again=True)
    owner, *made = waits
    assert owner.startswith("run (process ")
    assert made == [(vllm_client, 12.5), "cpu"]
    with servers.bounded():
        assert group.timeout == 12.5  # gloo's


@pytest.mark.parametrize(("follows", "wants"), [(True, True), (True, False), (False, True)])
def test_a_server_whose_tokens_depend_on_arrival(
    follows: bool, wants: bool, connected: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(servers_module.logger, "warning_once", said.append, raising=False)
    server = Server(ours=ours_of() | {"batches_follow_arrival": follows})
    RolloutServers(connected(server), TIMEOUT, wants_same_tokens=wants)
    assert len(said) == (follows and wants)
    named = "--full_determinism true: the tokens of server 0 (http://host0) depend on when requests"
    assert all(text.startswith(named) and "VLLM_BATCH_INVARIANT=1" in text for text in said)
