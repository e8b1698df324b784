"""The trainer's client gives each sample to its request, lets another server answer for one that
fails, and connects servers again that changed (F1 to F5). `tests/stack/test_failures.py` has
whole trainings."""

import io
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from requests.adapters import HTTPAdapter
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, UsageInfo
from swift.rlhf_trainers import vllm_client
from urllib3.exceptions import MaxRetryError, NewConnectionError, ReadTimeoutError

from swift_grpo_ext.ranks import RolloutError
from swift_grpo_ext.rollout import conversation, wire
from swift_grpo_ext.server import client as servers_module
from swift_grpo_ext.server.client import RolloutServers, connect_servers
from swift_grpo_ext.server.lease import Leaseholder
from tests.rig.server.served import drawn_by, request

TIMEOUT = 60.0  # seconds
TOKENS = ["<a>", "<b>"]
USAGE = asdict(UsageInfo(1, 1, 2))
MakeClient = Callable[..., Any]


def ours_of(replicas: int = 1, instance: str = "first start") -> dict[str, Any]:
    told = {"version": wire.VERSION, "instance": instance, "replicas": replicas, "starting": 0}
    return told | {"members": [f"{number}.0" for number in range(replicas)]}


@dataclass
class Server:
    """A server in memory: what it says of itself, its fault, and the requests that it had."""

    ours: Any = field(default_factory=ours_of)
    fault: Any = None  # an error of the connection, a status, or a fault of the answer
    asked: list[dict[str, Any]] = field(default_factory=list)
    timeouts: list[Any] = field(default_factory=list)

    def respond(self, request: requests.PreparedRequest, timeout: Any) -> requests.Response:
        self.timeouts.append(timeout)
        response = requests.Response()
        response.status_code = 200
        if request.path_url in ("/infer/", "/health/") and isinstance(self.fault, Exception):
            raise self.fault
        text = json.dumps({"engine_type": "LLMEngine", wire.KEY: self.ours})
        if request.path_url == "/infer/":
            text = json.dumps(self._infer(json.loads(request.body or "")["infer_requests"]))
            if isinstance(self.fault, int):
                response.status_code, text = self.fault, "replica 1 gave no answer"
            if self.fault == "no JSON":
                text = "Bad gateway"
            if self.fault == "another":
                response.headers[wire.MESSAGE_HEADER] = "another"
        if wire.STATUS_HEADER in request.headers:  # for conversations
            response.headers[wire.STATUS_HEADER] = "in the content"
            text = f"  {response.status_code}\n{text}"
        response.raw = io.BytesIO(text.encode())
        return response

    def _infer(self, asked: list[dict[str, Any]]) -> Any:
        self.asked += asked
        answers = []
        for one in asked:
            metadata: Any = wire.read_metadata(one["data_dict"])
            infos = {wire.KEY: drawn_by(metadata, "replica 0"), conversation.KEY: {}}
            response = {"model": "m", "choices": [], "usage": USAGE, "id": one["uuid"]}
            answers.append({"response": response, "rollout_infos": infos})
        return answers[:-1] if self.fault == "half" else answers


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> MakeClient:
    """Makes ms-swift's client, connected to servers at `http://host0` and so on."""

    def connect(*servers: Server) -> Any:
        def send(_: Any, request: requests.PreparedRequest, **options: Any) -> requests.Response:
            number = int(str(request.url).removeprefix("http://host")[0])
            return servers[number].respond(request, options["timeout"])

        monkeypatch.setattr(HTTPAdapter, "send", send)
        numbers = range(len(servers))
        return SimpleNamespace(
            num_servers=len(servers),
            sessions=[requests.Session() for _ in numbers],
            base_urls=[f"http://host{number}" for number in numbers],
            hosts=[f"host{number}" for number in numbers],
            group_ports=[*numbers],
            pynccl_comms=[f"group {number}" for number in numbers],
            close_communicator=list,
        )

    return connect


def ask(servers: RolloutServers, num_groups: int) -> list[Any]:
    """Ask for groups; check that each answer has its group's texts, and return the answers."""
    asked = [RolloutInferRequest(**request(group)) for group in range(num_groups)]
    metadatas: list[Any] = [wire.read_metadata(one.data_dict) for one in asked]
    answers = servers.infer(asked, metadatas, RequestConfig(max_tokens=8))
    texts = [[completion.text for completion in completions] for completions, _ in answers]
    assert texts == [[f"{group}.{k}" for k in range(4)] for group in range(num_groups)]
    return answers


def test_samples_come_back(connected: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers have one replica and two. The shortest engine bounds prompts, and the coarsest
    numbers bound the gap. A server whose tokens depend on the order of arrivals is named."""
    said: list[str] = []
    monkeypatch.setattr(servers_module.logger, "warning_once", said.append, raising=False)
    monkeypatch.setattr(servers_module, "waiting", lambda what: nullcontext(said.append(what)))
    one, two = Server(), Server(ours=ours_of(2))
    for server, length, bits in ((one, 512, 16), (two, 256, 32)):
        server.ours |= {"max_model_len": length, "number_bits": bits}
        server.ours |= {"new_special_tokens": TOKENS, "batches_follow_arrival": bits == 16}
    client = connected(one, two)
    servers = RolloutServers(client, TIMEOUT, new_special_tokens=TOKENS, wants_same_tokens=True)
    assert (servers.max_model_len, servers.number_bits) == (256, 16)
    [warning] = said
    assert "the tokens of server 0 (http://host0) depend on when requests arrive" in warning
    for completions, _ in ask(servers, 9):
        seeds = [completion.seed for completion in completions]
        assert seeds == list(range(seeds[0], seeds[0] + 4))
    assert (len(one.asked), len(two.asked)) == (3, 6)
    first = "train round 0.0, group 1, sample 0"
    assert f"server 0 (http://host0): 3 requests, the first {first}" in said


def test_conversations_come_back(connected: MakeClient) -> None:
    """One that a server leaves out is led by another."""
    asked = [RolloutInferRequest(**request(group), uuid=f"{group}") for group in range(4)]
    servers = RolloutServers(connected(Server(fault="half"), Server()), TIMEOUT)
    outputs = servers.converse(asked, RequestConfig())
    assert [output.response.id for output in outputs] == ["0", "1", "2", "3"]
    names = {output.rollout_infos[conversation.KEY]["server"] for output in outputs}
    assert names == {"server 1 (http://host1)"}


@pytest.mark.parametrize(
    ("ours", "tokens", "message"),
    [
        (None, (), r"runs without swift-grpo-ext: start it with"),
        (
            ours_of() | {"new_special_tokens": ["<b>"]},
            (),
            r"was started with --new_special_tokens <b>, this .* \(none\)",
        ),
        (ours_of(), ["<a>"], r" \(none\), this training with <a>: the same ids"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(
    ours: Any, tokens: Sequence[str], message: str, connected: MakeClient
) -> None:
    client = connected(Server(ours=ours))
    with pytest.raises(ValueError, match=rf"^server 0 .*{message}"):
        RolloutServers(client, TIMEOUT, new_special_tokens=tokens)


@pytest.mark.parametrize(
    ("fault", "error", "is_lost"),
    [
        (requests.ReadTimeout("late"), r"does not answer \(ReadTimeout: late", True),
        ("another", r"gave the answer to another request\.", True),
        (503, "answered 503: replica 1 gave no answer", True),
        (500, "answered 500: replica 1 gave no answer", False),
        ("no JSON", "answered with no JSON", False),
        ("half", "gave an answer that makes no sense", False),
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
    ask(servers, 4)
    # From now on only the other one gets weights; its name does not change.
    assert client.pynccl_comms == ["group 0", "group 1"][is_lost:]
    assert client.num_servers == len(client.sessions) == 2 - is_lost
    if is_lost:
        completions, _ = ask(servers, 1)[0]
        assert {c.replica for c in completions} == {"server 1 (http://host1) replica 0"}


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_the_callers_fault_is_tried_nowhere_else(status: int, connected: MakeClient) -> None:
    """The training ends, and no server counts as lost."""
    client = connected(Server(fault=status), healthy := Server())
    servers = RolloutServers(client, TIMEOUT)
    with pytest.raises(RolloutError, match=rf"server 0 .* refused the request \({status}\): repl"):
        ask(servers, 1)
    row = RolloutInferRequest(messages=[], data_dict={"answer": float("nan")})
    metadata: Any = wire.read_metadata(request(2)["data_dict"])
    message = r"round 0\.0, group 2, sample 0: the row cannot be sent .*Mend"
    with pytest.raises(RolloutError, match=message):
        servers.infer([row], [metadata], RequestConfig())
    assert (client.num_servers, healthy.asked) == (2, [])


def test_servers_are_reconnected(
    connected: MakeClient, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Servers are connected again after they lost replicas, after a restart, and after a failed
    update. A group that cannot be made is tried thrice."""
    made: list[tuple[Any, ...]] = []

    def connect(alone: Any, timeout: float) -> None:
        made.append((alone.num_servers, alone.base_urls, alone.hosts, alone.group_ports, timeout))
        if len(made) > 2:
            raise TimeoutError("no answer")
        alone.pynccl_comms = ["new"]

    monkeypatch.setattr(servers_module, "connect", connect)
    other, server = Server(), Server(ours=ours_of(2))
    client = connected(other, server)
    servers = RolloutServers(client, TIMEOUT)
    assert client.sessions[1].headers[wire.INSTANCE_HEADER] == "first start"
    assert (servers.reconnect(), made) == (False, [])
    for ours, what in (
        (ours_of(1), "has reconnected; "),
        (ours_of(1, "second start"), "was restarted; "),
    ):
        server.ours = ours
        assert servers.reconnect()
        assert what in warnings.pop()
        assert made.pop() == (1, ["http://host1"], ["host1"], [1], TIMEOUT)
        assert client.pynccl_comms == ["group 0", "new"]
        assert client.sessions[1].headers[wire.INSTANCE_HEADER] == ours["instance"]
        assert [server.replicas for server in servers._used()] == [1, 1]
        assert not servers.reconnect()
    assert servers.reconnect(again=True)
    assert [group[1] for group in made] == [["http://host0"], ["http://host1"]]
    ask(servers, 8)
    assert (len(other.asked), len(server.asked)) == (4, 4)
    with pytest.raises(RolloutError, match=r"server 1 .*group was not made \(no answer\)"):
        servers.reconnect(again=True)
    assert [group[1] for group in made[2:]] == [["http://host0"]] * 3 + [["http://host1"]] * 3
    failed = "server 0 (http://host0): the weights' group was not made (no answer)."
    assert f"{failed} It is tried again." in warnings


def test_requests_are_sent_again_to_a_busy_server(connected: MakeClient) -> None:
    """Also to one that starts. A request with a late answer is not: it has used up its time."""
    client = connected(Server())
    RolloutServers(client, TIMEOUT)
    tries = client.sessions[0].get_adapter("http://host0/infer/").max_retries
    assert tries.is_retry("POST", 503, has_retry_after=True)
    assert not tries.is_retry("POST", 503)
    late: Any = ReadTimeoutError(None, "", "late")  # type: ignore[arg-type]
    with pytest.raises(ReadTimeoutError):
        tries.increment("POST", "/infer/", error=late)
    refused: Any = NewConnectionError(None, "refused")  # type: ignore[arg-type]
    for _ in range(6):
        tries = tries.increment("POST", "/infer/", error=refused)
    with pytest.raises(MaxRetryError, match="url: /infer/"):
        tries.increment("POST", "/infer/", error=refused)


def test_bounds_grow_outwards(connected: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one flag on both sides the trainer outlasts its server, and each wait of the weights'
    group has the flag's bound: vLLM would wait 300 s for a server that does not come (F2)."""
    assert 1.0 < 2.0 < wire.SERVER_TIMEOUTS < wire.TRAINER_TIMEOUTS
    waits: list[Any] = []
    bounded = lambda *bound: nullcontext(waits.append(bound))  # noqa: E731
    monkeypatch.setattr(servers_module, "bounded_rendezvous", bounded)
    monkeypatch.setattr(Leaseholder, "keep", lambda self: waits.append(self.owner))
    args: Any = SimpleNamespace(
        output_dir="run", rollout_timeout=7.5, new_special_tokens=[], full_determinism=False
    )
    client = connected(server := Server())
    client.init_communicator = lambda device: waits.append(torch.device(device).type)
    servers = connect_servers(client, args)
    assert client.sessions[0].headers[wire.TIMEOUT_HEADER] == "7.5"
    client.sessions[0].get("http://host0/health/")
    assert [seconds for _, seconds in server.timeouts] == pytest.approx([22.5, 22.5], abs=0.5)
    assert servers.reconnect(again=True)
    owner, *made = waits
    assert owner.startswith("run (process ")
    assert made == [(vllm_client, 7.5), "cpu"]
    group: Any = SimpleNamespace(rank=1, world_size=2)
    client.pynccl_comms = [SimpleNamespace(group=group)]
    with servers.bounded():
        assert group.timeout == 7.5  # gloo's
