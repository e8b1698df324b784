"""The trainer's side of `swift rollout`, against servers that answer over real HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers import vllm_client
from urllib3.exceptions import NewConnectionError

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.dispatch import WorkerLostError
from swift_grpo_ext.rollout.rank_group import RolloutError
from swift_grpo_ext.rollout.wire import Completion, RequestMetadata, WireError
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import client as servers_module
from swift_grpo_ext.server.client import RolloutServers, connect_servers
from swift_grpo_ext.server.lease import Leaseholder
from swift_grpo_ext.upstream.weight_sync import GlooCommunicator
from tests.upstream.test_weight_sync import put_back

TIMEOUT = 60.0  # seconds
OF_ONE_THAT_HANGS = 4.0


def ours_of(replicas: int = 1, instance: str = "first start", starting: int = 0) -> dict[str, Any]:
    members = [f"{number}.0" for number in range(replicas)]
    said = {"replicas": replicas, "members": members, "starting": starting}
    return {"version": wire.VERSION, "instance": instance, **said}


@dataclass
class Server:
    """What a server says of itself, and what it was asked."""

    ours: Any = field(default_factory=ours_of)
    status: int = 200
    fault: str = ""
    closes: int = 0
    """Connections of `/infer/` to close before one is answered."""

    message: str | None = None
    """The name that answers have, in the place of their requests'."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: Any) -> Any:
        if path == "/get_engine_type/":
            return {"engine_type": "LLMEngine", **({wire.KEY: self.ours} if self.ours else {})}
        if path == "/close_communicator/":
            return {}
        self.asked += body["infer_requests"]
        answers = [self._draw(request) for request in body["infer_requests"]]
        if self.fault == "nonsense":
            answers[0]["rollout_infos"][wire.KEY]["lengths"] = 7
        return answers[:-1] if self.fault == "half" else answers

    def _draw(self, request: dict[str, Any]) -> dict[str, Any]:
        metadata = wire.read_metadata(request["data_dict"])
        assert metadata is not None
        group = metadata.sample_id.group
        drawn = [
            Completion(text=f"{group}.{k}", token_ids=[group, k], logprobs=None, finish_reason=None)
            for k in range(metadata.count)
        ]
        return {"rollout_infos": {wire.KEY: wire.pack_answer(drawn, [1, 2], "replica 0")}}


@contextmanager
def running(*servers: Server) -> Iterator[Any]:
    """What is read of ms-swift's client, connected to these servers."""
    hosts = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(server)) for server in servers]
    for server, host in zip(servers, hosts, strict=True):
        server.url = f"http://127.0.0.1:{host.server_port}"
        Thread(target=host.serve_forever, args=[0.01], daemon=True).start()
    yield SimpleNamespace(
        num_servers=len(servers),
        sessions=[requests.Session() for _ in servers],
        base_urls=[server.url for server in servers],
        hosts=["127.0.0.1"] * len(servers),
        group_ports=list(range(len(servers))),
        pynccl_comms=[f"group {i}" for i in range(len(servers))],
    )
    for host in hosts:
        host.shutdown()
        host.server_close()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = json.dumps(server.answer(self.path, json.loads(body or "null"))).encode()
            server.closes -= self.path == "/infer/"
            if self.path == "/infer/" and (server.fault == "closes" or server.closes >= 0):
                self.connection.close()
                return
            if self.path == "/infer/" and server.fault == "hangs":
                time.sleep(OF_ONE_THAT_HANGS)
            if self.path == "/infer/" and server.fault == "no JSON":
                answer = b"Bad gateway"
            failed = self.path == "/infer/" and server.status != 200
            self.send_response(server.status if failed else 200)
            if server.message is not None:
                self.send_header(wire.MESSAGE_HEADER, server.message)
            self.end_headers()
            self.wfile.write(b'{"detail": "replica 1 gave no answer"}' if failed else answer)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def ask(servers: RolloutServers, num_groups: int, count: int = 4) -> list[Any]:
    asked, metadatas = [], []
    for group in range(num_groups):
        sample_id = SampleId(phase="train", step=0, number=0, group=group, index=0)
        metadatas.append(
            RequestMetadata(sample_id=sample_id, count=count, run_seed=42, packed=True)
        )
        asked.append(RolloutInferRequest(messages=[{"role": "user", "content": "?" * group}]))
        wire.write_metadata(asked[-1].data_dict, metadatas[-1])
    return servers.infer(asked, metadatas, RequestConfig(max_tokens=8))


def test_samples_come_back_to_their_requests() -> None:
    small, large = Server(), Server(ours=ours_of(2))
    with running(small, large) as client:
        servers = RolloutServers(client, TIMEOUT)
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
        assert len(ask(RolloutServers(client, TIMEOUT), 1)) == 1
        assert ask(RolloutServers(client, TIMEOUT), 0) == []


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
        (TOKENS, ["<a>"], ValueError, "with --new_special_tokens <b>, this training with <a>"),
        (ours_of(), ["<a>"], ValueError, r" \(none\), this training with <a>: the same ids"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(
    ours: Any, tokens: Sequence[str], error: type[Exception], message: str
) -> None:
    with (
        running(Server(ours=ours)) as client,
        pytest.raises(error, match=rf"^server 0 .*{message}"),
    ):
        RolloutServers(client, TIMEOUT, new_special_tokens=tokens)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "BACKOFF", (0.01, 0.02, 0.04))


FAULTS = {
    "closes": r"server 0 \(.*\) does not answer \(ConnectionError",
    "hangs": r"server 0 \(.*\) does not answer \(ReadTimeout",
    "no JSON": "server 0 .* answered with no JSON",
    "half": "server 0 .* gave 1 answers to 2 requests",
    "nonsense": "server 0 .* gave an answer that makes no sense",
    "503": "server 0 .* answered 503: .*replica 1 gave no answer",
    "500": "server 0 .* answered 500: .*replica 1 gave no answer",
}


def failing_server(fault: Any) -> Server:
    return Server(status=int(fault)) if fault.isdigit() else Server(fault=fault)


def timeout_for(fault: str) -> float:
    """The other server has three times as long: a busy machine's tenth of a second is not rare."""
    return 0.6 if fault == "hangs" else TIMEOUT


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_server_cannot_answer_another_does(fault: str) -> None:
    """With no other, its error names it and the cause."""
    with running(failing_server(fault)) as client:
        servers = RolloutServers(client, timeout_for(fault))
        with pytest.raises(RolloutError, match=FAULTS[fault]):
            ask(servers, 2)
    healthy = Server()
    with running(failing_server(fault), healthy) as client:
        servers = RolloutServers(client, timeout_for(fault))
        answers = ask(servers, 4)
        assert [[c.text for c in cs] for cs, _ in answers] == [
            [f"{group}.{k}" for k in range(4)] for group in range(4)
        ]
        # Weights, too, go to the other alone from now on; its name stays what it was.
        is_lost = fault in ("closes", "hangs", "503")
        assert client.pynccl_comms == ["group 0", "group 1"][is_lost:]
        assert client.num_servers == len(client.sessions) == 2 - is_lost
        if is_lost:
            completions, _ = ask(servers, 1)[0]
            assert {c.replica for c in completions} == {f"server 1 ({healthy.url}) replica 0"}


def test_servers_are_connected_anew_where_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer replicas, a start anew, an update that failed."""
    other, server = Server(), Server(ours=ours_of(2))
    with running(other, server) as client:
        connected: list[Any] = []

        def connect(alone: Any, timeout: float) -> None:
            assert timeout == TIMEOUT
            connected.append((alone.num_servers, alone.base_urls, alone.hosts, alone.group_ports))
            alone.pynccl_comms = ["a new group"]

        monkeypatch.setattr(servers_module, "connect", connect)
        servers = RolloutServers(client, TIMEOUT)
        assert client.sessions[1].headers[wire.INSTANCE_HEADER] == "first start"
        assert (servers.reconnect(), connected) == (False, [])
        for ours in (ours_of(1), ours_of(1, "second start")):
            server.ours = ours
            assert servers.reconnect()
            assert connected.pop() == (1, [server.url], ["127.0.0.1"], [1])
            assert client.pynccl_comms == ["group 0", "a new group"]
            assert client.sessions[1].headers[wire.INSTANCE_HEADER] == ours["instance"]
            assert servers.replicas == [1, 1]
            assert not servers.reconnect()
        assert servers.reconnect(again=True)
        assert [urls for _, urls, _, _ in connected] == [[other.url], [server.url]]
        ask(servers, 8)
        assert (len(other.asked), len(server.asked)) == (4, 4)


def test_a_group_that_cannot_be_made_is_tried_thrice(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Server(), Server()) as client:
        tried: list[str] = []
        said: list[str] = []

        def connect(alone: Any, _: float) -> None:
            tried.extend(alone.base_urls)
            raise TimeoutError("no answer")

        monkeypatch.setattr(servers_module, "connect", connect)
        monkeypatch.setattr(servers_module.logger, "warning", said.append)
        servers = RolloutServers(client, TIMEOUT)
        with pytest.raises(RolloutError, match=r"server 1 .*group was not made \(no answer\)"):
            servers.reconnect(again=True)
    assert len(tried) == 6
    failed = f"server 0 ({tried[0]}): the weights' group was not made (no answer)."
    assert said[1] == f"{failed} It is tried again."
    assert said[5] == f"{failed} Others generate its groups, if there are any."


def test_replicas_that_are_being_started_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server has no other; within the timeout."""
    server = Server()
    with running(server) as client:
        clock = Clock()
        monkeypatch.setattr(servers_module, "time", clock)
        monkeypatch.setattr(
            servers_module, "connect", lambda alone, _: vars(alone).update(pynccl_comms=["new"])
        )
        servers = RolloutServers(client, 1.2)
        server.ours = ours_of(0, starting=1)
        monkeypatch.setattr(servers_module, "SECONDS_BETWEEN_LOOKS", 0.5)
        with pytest.raises(RolloutError, match=r"server 0 .*has no replica left"):
            servers.reconnect()
        assert clock.now == 1.5

        def sleep(seconds: float) -> None:
            server.ours = ours_of(1, "second start")

        clock.sleep = sleep  # type: ignore[method-assign]
        assert servers.reconnect()
        assert servers.replicas == [1]


def test_a_lost_server_leaves_the_other_its_own_group_and_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between rounds: weights, requests and replica counts go on with the other's. Once it answers
    again, it is taken back with the next weight update, and has a group of its own."""
    lost, healthy = Server(ours=ours_of(3)), Server(ours=ours_of(2, "second"))
    with running(lost, healthy) as client:
        monkeypatch.setattr(
            servers_module, "connect", lambda alone, _: vars(alone).update(pynccl_comms=["new"])
        )
        servers = RolloutServers(client, TIMEOUT)
        lost.ours = ours_of(0)
        for _ in range(2):
            assert not servers.reconnect()
            assert (client.base_urls, client.num_servers) == ([healthy.url], 1)
            assert (client.hosts, client.group_ports) == (["127.0.0.1"], [1])
            assert client.pynccl_comms == ["group 1"]
            assert client.sessions[0].headers[wire.INSTANCE_HEADER] == "second"
            assert servers.replicas == [2]
        completions, _ = ask(servers, 1)[0]
        assert {c.replica for c in completions} == {f"server 1 ({healthy.url}) replica 0"}
        lost.ours = ours_of(1)
        assert servers.reconnect()
        assert client.base_urls == [healthy.url, lost.url]
        assert client.group_ports == [1, 0]
        assert client.pynccl_comms == ["group 1", "new"]
        assert servers.replicas == [2, 1]


def test_a_connection_that_is_cut_is_tried_again() -> None:
    server = Server(closes=3)
    with running(server) as client:
        answers = ask(RolloutServers(client, TIMEOUT), 2)
    assert [cs[3].text for cs, _ in answers] == ["0.3", "1.3"]
    with running(Server(closes=4)) as client:
        servers = RolloutServers(client, TIMEOUT)
        with pytest.raises(RolloutError, match=r"server 0 .* does not answer"):
            ask(servers, 2)


class Clock:
    """In the place of `time`: a pause is over at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


BUSY = (503, {"Retry-After": "1"})


@pytest.mark.parametrize(
    ("timeout", "outcomes", "timeouts"),
    [
        (20.0, [BUSY, BUSY, (200, {})], [(10.0, 20.0), (10.0, 19.0), (10.0, 17.0)]),
        (2.5, [BUSY, BUSY], [(2.5, 2.5), (1.5, 1.5)]),
        (1.0, [BUSY, BUSY], [(1.0, 1.0), (0.001, 0.001)]),
        (99.0, [BUSY] * 4, [(10.0, 99.0), (10.0, 98.0), (10.0, 96.0), (10.0, 92.0)]),
        (20.0, [(503, {})], [(10.0, 20.0)]),
        (20.0, [(500, {"Retry-After": "1"})], [(10.0, 20.0)]),
    ],
)
def test_all_tries_of_a_request_share_one_bound(
    timeout: float,
    outcomes: list[tuple[int, dict[str, str]]],
    timeouts: list[tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers_module, "BACKOFF", (1.0, 2.0, 4.0))
    monkeypatch.setattr(servers_module, "time", Clock())
    answers = [SimpleNamespace(status_code=code, headers=headers) for code, headers in outcomes]
    given: list[Any] = []

    def send(_: Any, request: Any, **kwargs: Any) -> Any:
        given.append(kwargs["timeout"])
        return answers[len(given) - 1]

    monkeypatch.setattr(servers_module.HTTPAdapter, "send", send)
    adapter = servers_module._BoundedAdapter(timeout)
    request = requests.Request("POST", "http://a/infer/").prepare()
    assert adapter.send(request) is answers[-1]
    assert given == timeouts
    given.clear()
    adapter.send(request, timeout=3.0)
    assert given[0] == 3.0


@pytest.mark.parametrize(
    ("path", "is_repeated"),
    [
        ("/infer/", True),
        ("/reset_mm_cache/", True),
        ("/get_engine_type/", True),
        ("/update_flattened_params/", False),
        ("/init_communicator/", False),
    ],
)
def test_only_what_may_be_repeated_is_tried_again(
    path: str, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    errors: list[Exception] = []

    def send(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise errors[0]

    monkeypatch.setattr(servers_module.HTTPAdapter, "send", send)
    request = requests.Request("POST", f"http://a{path}").prepare()
    never_made: Any = SimpleNamespace(reason=NewConnectionError(None, "refused"))
    for error, num_tries in (
        (requests.ConnectionError("reset"), 4 if is_repeated else 1),
        (requests.ConnectionError(), 4 if is_repeated else 1),
        (requests.ConnectTimeout(), 4),
        (requests.ConnectionError(never_made), 4),
    ):
        errors[:], tries[:] = [error], []
        with pytest.raises(requests.ConnectionError):
            servers_module._BoundedAdapter(TIMEOUT).send(request)
        assert len(tries) == num_tries


def test_the_callers_fault_is_tried_nowhere_else() -> None:
    healthy = Server()
    with running(Server(status=400), healthy) as client:
        servers = RolloutServers(client, TIMEOUT)
        with pytest.raises(
            RolloutError, match=r"server 0 .* refused the request \(400\): .*gave no"
        ):
            ask(servers, 1)
        assert client.num_servers == 2
    assert healthy.asked == []


def test_an_answer_to_another_request_is_never_data() -> None:
    server = Server()
    with running(server, Server()) as client:
        servers = RolloutServers(client, TIMEOUT)
        server.message = "another"
        answers = ask(servers, 4)
        assert [cs[0].text for cs, _ in answers] == ["0.0", "1.0", "2.0", "3.0"]
        assert client.num_servers == 1
        with running(Server(message="another")) as alone:
            message = r"server 0 \(.*\) gave the answer to another request\."
            with pytest.raises(WorkerLostError, match=message):
                RolloutServers(alone, TIMEOUT)


def test_a_row_that_json_cannot_hold_is_named() -> None:
    with running(Server()) as client:
        servers = RolloutServers(client, TIMEOUT)
        sample_id = SampleId(phase="train", step=3, number=0, group=2, index=0)
        metadata = RequestMetadata(sample_id=sample_id, count=1, run_seed=42, packed=True)
        row = RolloutInferRequest(messages=[], data_dict={"answer": float("nan")})
        message = r"round 3\.0, group 2, sample 0: the row cannot be sent .*Mend"
        with pytest.raises(RolloutError, match=message):
            servers.infer([row], [metadata], RequestConfig())


def test_bounds_grow_outwards() -> None:
    """With one flag on both sides the trainer outlasts its server (F2)."""
    assert 1.0 < 2.0 < wire.SERVER_TIMEOUTS < wire.TRAINER_TIMEOUTS
    with running(Server()) as client:
        RolloutServers(client, 7.5)
        [session] = client.sessions
        assert session.headers[wire.TIMEOUT_HEADER] == "7.5"
        for scheme in ("http", "https"):
            assert session.get_adapter(f"{scheme}://a")._timeout == 22.5


@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_wait_of_a_group_has_the_bound_of_the_flag(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would wait 300 s for a server that does not come."""
    made: list[Any] = []

    class Group:
        @staticmethod
        def create(*args: Any, **kwargs: Any) -> Any:
            made.append((args, kwargs))
            return SimpleNamespace(rank=1, world_size=2, barrier=dict)

    def init_communicator(device: Any) -> None:
        group = vllm_client.StatelessProcessGroup.create("host", 7)
        alone.pynccl_comms = [SimpleNamespace(group=group)]

    monkeypatch.setattr(vllm_client, "StatelessProcessGroup", Group)
    monkeypatch.setattr(servers_module, "has_accelerator", lambda: on_gpu)
    monkeypatch.setattr(Leaseholder, "keep", lambda self: made.append(self.owner))
    put_back(monkeypatch)
    alone: Any = SimpleNamespace(init_communicator=init_communicator)
    args: Any = SimpleNamespace(output_dir="run", rollout_timeout=12.5, new_special_tokens=[])
    with running(Server()) as client:
        servers = connect_servers(client, args)
    servers_module.connect(alone, servers._timeout)
    owner, group = made
    assert owner.startswith("run (process ")
    assert group == (("host", 7), {"store_timeout": 12})
    assert vllm_client.StatelessProcessGroup is Group
    [communicator] = alone.pynccl_comms
    assert communicator.group.barrier() == {"timeout": 12.5}
    assert isinstance(communicator, GlooCommunicator) != on_gpu
    assert on_gpu or communicator._timeout.total_seconds() == 12.5
