"""The routes of `swift rollout`: requests over replicas, bounded in time; faults; weights."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from fastapi.testclient import TestClient
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.server import replicas, routes
from swift_grpo_ext.server.client import RolloutServers
from swift_grpo_ext.server.lease import OWNER_HEADER, PATH
from tests.rig.server.served import Deployed, Replica, groups_of, listening, request

CONFIG = {"max_tokens": 16}
RESETS = ("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache")


def infer(
    replicas: list[Replica], asked: list[dict[str, Any]], timeout: float = 60.0, **headers: str
) -> Any:
    client = TestClient(Deployed(*replicas, timeout=timeout).app)
    body = {"infer_requests": asked, "request_config": CONFIG}
    return client.post("/infer/", json=body, headers=headers)


# --- dispatching ---


@pytest.mark.parametrize(
    ("words", "count", "config", "shares"),
    [
        (4000, 4, CONFIG, [[0], [1, 2, 3, 4, 5]]),
        (1, 64, CONFIG, [[0], [1, 2, 3, 4, 5]]),
        (1, 64, None, [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_groups_go_to_replicas_by_cost(
    words: int, count: int, config: dict[str, int] | None, shares: list[list[int]]
) -> None:
    """A replica with a long prompt or a large group gets no other."""
    two = [Replica(), Replica()]
    asked = [request(0, words, count=count), *(request(group, count=4) for group in range(1, 6))]
    body = {"infer_requests": asked, "request_config": config}
    assert groups_of(TestClient(Deployed(*two).app).post("/infer/", json=body)) == list(range(6))
    assert [replica.groups for replica in two] == shares


def test_requests_of_other_clients_go_in_contiguous_slices() -> None:
    """Schedulers of a server may answer with more outputs than requests."""
    two = [Replica(), Replica("answers half")]
    asked = [request(group, as_arrays=False) for group in range(5)]
    assert groups_of(infer(two, asked)) == [0, 1, 2, 3]
    assert [replica.groups for replica in two] == [[0, 1, 2], [3, 4]]
    assert groups_of(infer([Replica(), Replica("ends")], asked)) == [0, 1, 2, 3, 4]
    many = [Replica() for _ in range(7)]
    assert groups_of(infer(many, asked)) == [0, 1, 2, 3, 4]
    assert [replica.groups for replica in many] == [[0], [1], [2], [3], [4], [], []]
    asked[0]["data_dict"] = {}
    assert groups_of(infer([Replica()], asked)) == [-1] * 5


OF_ONE_THAT_HANGS = 1.5
"""Timeout in seconds. The other replica needs milliseconds, but more on a busy machine."""

FAULTS = {
    "raises": "a replica failed: OSError: the disk is gone",
    "answers nothing": "a replica gave no answers; the log of `swift rollout` tells why",
    "answers half": "a replica gave 3 answers to 4 requests",
    "ends": "a replica has ended (EOFError)",
    "hangs": f"a replica has not answered for {OF_ONE_THAT_HANGS} s (--rollout_timeout)",
    "answers another": "a replica answered message 0, expected 1",
}
LOST = ("ends", "hangs", "answers another")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_replica_cannot_answer_another_does(fault: str) -> None:
    """Without another replica, the cause is named."""
    timeout = OF_ONE_THAT_HANGS if fault == "hangs" else 60.0
    failing, healthy = Replica(fault), Replica()
    both = [failing, healthy] if fault < "c" else [healthy, failing]
    deployed = Deployed(*both, timeout=timeout)
    client = TestClient(deployed.app)
    asked = {"infer_requests": [request(group) for group in range(8)]}
    assert groups_of(client.post("/infer/", json=asked)) == list(range(8))
    assert sorted(healthy.groups) == list(range(8))
    is_lost = fault in LOST
    assert deployed.connections == [healthy.connection] or not is_lost
    assert failing.is_alive() != is_lost
    assert client.get("/get_world_size/").json() == {"world_size": 2 if is_lost else 4}
    ours = client.post("/get_engine_type/").json()[wire.KEY]
    assert ours["replicas"] == (1 if is_lost else 2)
    assert groups_of(client.post("/infer/", json=asked)) == list(range(8))
    failed = infer([Replica(fault)], [request(group) for group in range(4)], timeout)
    assert FAULTS[fault] in failed.json()["detail"]
    assert failed.status_code == (503 if is_lost else 500)


def test_with_no_replica_a_server_says_so() -> None:
    none = infer([], [request(0)])
    assert (none.status_code, none.json()["detail"]) == (503, "it has no replica left")
    assert infer([], [request(0, as_arrays=False)]).status_code == 503


@pytest.mark.parametrize("is_ours", [True, False])
def test_replicas_that_wait_for_weights_draw_nothing(is_ours: bool) -> None:
    waiting = Replica()
    waiting.connection.holds_weights = False
    refused = infer([waiting], [request(0, as_arrays=is_ours)])
    expected = "its 1 replicas wait for a training's weights; send these first"
    assert (refused.status_code, refused.json()["detail"]) == (500, expected)
    assert waiting.calls == []


# --- answers are paired (F1) ---


def test_an_answer_has_the_name_of_its_request() -> None:
    answer = infer([Replica()], [request(0)], **{wire.MESSAGE_HEADER: "abc"})
    assert answer.headers[wire.MESSAGE_HEADER] == "abc"
    assert wire.MESSAGE_HEADER not in infer([Replica()], [request(0)]).headers


# --- time (F2) ---


OWNED = {OWNER_HEADER: "runs/a"}
SHORT = {wire.TIMEOUT_HEADER: "1"}


@pytest.mark.parametrize("path", [*(f"/{name}/" for name in RESETS), "/get_engine_type/"])
def test_every_call_is_bounded(path: str) -> None:
    """The bound is the owner's if that is shorter than the server's."""
    method = path.strip("/")
    stuck = Replica(**{method: "hangs"})
    if method == "get_engine_type":  # a replica whose loop hangs answers nothing
        stuck = Replica("hangs")
        stuck.connection.send({"type": "call", "method": "infer", "kwargs": {"infer_requests": []}})
    deployed = Deployed(stuck, timeout=60.0)
    failed = TestClient(deployed.app).post(path, headers=OWNED | SHORT)
    assert failed.status_code == 503
    assert "has not answered for 1 s" in failed.json()["detail"]
    assert deployed.connections == []


@pytest.mark.parametrize("is_leased", [True, False])
def test_the_bound_of_a_stranger_ends_no_replica(is_leased: bool) -> None:
    """A busy replica is not ended by the stranger's bound, and answers later."""
    slow = Replica(read_weight_report="is late")
    deployed = Deployed(slow, timeout=60.0)
    client = TestClient(deployed.app)
    if is_leased:
        assert client.post(PATH, headers=OWNED).json() == {"owner": "runs/a"}
    threading.Timer(1.5, slow.goes_on.set).start()
    told = client.get(routes.REPORTS_PATH, headers=SHORT)
    assert told.status_code == (409 if is_leased else 200)
    for bound in ("1", "1e308"):
        told = client.post("/get_engine_type/", headers={wire.TIMEOUT_HEADER: bound})
        assert (told.status_code, told.json()[wire.KEY]["replicas"]) == (200, 1)
    assert deployed.connections == [slow.connection]
    assert slow.is_alive()


@pytest.mark.parametrize("headers", [{}, OWNED])
def test_a_bound_that_is_none_is_refused(headers: dict[str, str]) -> None:
    """Every route refuses it, for any client; replicas are left alone."""
    replica = Replica()
    deployed = Deployed(replica)
    client = TestClient(deployed.app, headers=headers | {wire.TIMEOUT_HEADER: "1,2"})
    for path in ("/get_engine_type/", "/infer/", "/init_communicator/", "/reset_mm_cache/"):
        refused = client.post(path)
        assert refused.status_code == 400, path
        expected = f"{wire.TIMEOUT_HEADER}: could not convert string to float: '1,2'; expected"
        assert refused.json()["detail"].startswith(expected)
    assert client.get("/health/").status_code == 200
    assert (deployed.connections, replica.calls) == ([replica.connection], [])


@pytest.mark.parametrize(
    ("bound", "expected"), [("1e-6", 1.0), ("-1", 1.0), ("nan", 1.0), ("7", 7.0), ("inf", 60.0)]
)
def test_a_bound_lies_between_a_second_and_the_servers_own(bound: str, expected: float) -> None:
    deployed = Deployed(Replica(), timeout=60.0)
    headers = OWNED | {wire.TIMEOUT_HEADER: bound}
    assert TestClient(deployed.app).get("/get_world_size/", headers=headers).status_code == 200
    assert deployed.timeout == expected


def test_a_stranger_lets_no_replica_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients know the name of the server's start; it does not make them owners."""
    deployed = Deployed(Replica())
    admitted: list[str] = []
    monkeypatch.setattr(deployed.restarts, "admit", lambda: admitted.append("one"))
    client = TestClient(deployed.app)
    client.post(PATH, headers=OWNED)
    named = {wire.INSTANCE_HEADER: routes.INSTANCE}
    assert client.post("/get_engine_type/", headers=named).status_code == 200
    assert admitted == []
    assert client.post("/get_engine_type/", headers=named | OWNED).status_code == 200
    assert admitted == ["one"]


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_health_answers_while_replicas_hang() -> None:
    stuck = Replica("hangs")
    with listening(Deployed(stuck, timeout=60.0)) as url:
        body = {"infer_requests": [request(0)]}
        in_thread(lambda: requests.post(url + "/infer/", json=body, timeout=20))
        wait_until(lambda: stuck.groups == [0])
        in_thread(lambda: requests.post(url + "/get_engine_type/", timeout=20))
        for _ in range(3):
            assert requests.get(f"{url}/health/", timeout=15).status_code == 200
        stuck.kill()
        assert requests.get(f"{url}/health", timeout=15).status_code == 503


def test_a_body_that_never_ends_blocks_nobody() -> None:
    with listening(Deployed(Replica(), timeout=1.5)) as url:
        clients = [
            socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) for _ in "ab"
        ]
        head = b"POST /infer/ HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
        for client in clients:
            client.sendall(head)
        clients[1].close()
        body = {"infer_requests": [request(0)]}
        assert groups_of(requests.post(f"{url}/infer/", json=body, timeout=10)) == [0]
        clients[0].settimeout(10)
        assert clients[0].recv(100).startswith(b"HTTP/1.1 408")
        clients[0].close()


def test_a_server_that_is_busy_says_so() -> None:
    slow = Replica("is late")
    with listening(Deployed(slow)) as url:
        body = {"infer_requests": [request(0)]}
        first: list[Any] = []
        thread = in_thread(
            lambda: first.append(requests.post(f"{url}/infer/", json=body, timeout=20))
        )
        wait_until(lambda: slow.groups == [0])
        busy = requests.post(f"{url}/reset_mm_cache/", headers=OWNED | SHORT, timeout=20)
        assert (busy.status_code, busy.headers["Retry-After"]) == (503, "1")
        assert "busy with another request" in busy.json()["detail"]
        slow.goes_on.set()
        thread.join(20)
        assert groups_of(first[0]) == [0]
        reset = requests.post(f"{url}/reset_mm_cache/", headers=OWNED, timeout=20)
        assert reset.json() == {"message": "reset_mm_cache is done."}


def test_a_slow_answer_begins_at_once_and_is_given_up_with_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Replica("is late")
    monkeypatch.setattr(replicas, "give_up", slow.goes_on.set)
    with listening(Deployed(slow)) as url:
        body, headers = {"infer_requests": [request(0)]}, {wire.STATUS_HEADER: "1"}
        ask = partial(requests.post, f"{url}/infer/", json=body, headers=headers, timeout=10)
        answer = ask(stream=True)
        assert next(answer.iter_content(1)) == b" "
        assert not slow.goes_on.is_set()
        answer.close()
        wait_until(slow.goes_on.is_set)
        answer = ask()
        assert answer.headers[wire.STATUS_HEADER]
        status, _, content = answer.content.lstrip().partition(b"\n")
        assert status == b"200"
        assert [one["rollout_infos"]["group"] for one in json.loads(content)] == [0]


# --- the caller's fault (F5) ---


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"messages": None}, 422, ["messages", "valid list", "None"]),
        ({"messages": []}, 422, ["messages", "at least 1 item"]),
        ({"messages": [{"content": ""}]}, 422, ["messages", "role", "Field required"]),
        ({"images": 7}, 422, ["images", "valid list", "7"]),
        ({"data_dict": []}, 422, ["data_dict", "valid dictionary", "[]"]),
        ({"data_dict": {wire.KEY: {"version": 99}}}, 400, ["speaks version 99"]),
        ({"images": [f"data:{'x' * 9},"], "audios": [{"no": "path"}]}, 200, []),
    ],
)
def test_a_bad_request_is_refused_by_field_and_value(
    fields: dict[str, Any], status: int, words: list[str]
) -> None:
    replica = Replica()
    answer = infer([replica], [request(0), request(1) | fields])
    assert answer.status_code == status, answer.text
    assert [word for word in words if word not in answer.text] == []
    assert replica.groups == ([] if words else [0, 1])
    assert ('"infer_requests",1' in answer.text) == (status == 422)


def test_what_cannot_be_encoded_is_tried_once() -> None:
    two = [Replica("cannot encode"), Replica("cannot encode")]
    refused = infer(two, [request(0)])
    assert (refused.status_code, refused.json()["detail"]) == (
        400,
        "a replica failed: ValueError: no such image",
    )
    assert sorted(len(replica.groups) for replica in two) == [0, 1]
    assert all(replica.is_alive() for replica in two)


# --- weights ---


def test_a_server_that_was_started_anew_takes_no_work() -> None:
    """It answers 409 until the trainer has sent weights; calls that need none are answered."""
    client = TestClient(Deployed(Replica()).app, headers={wire.INSTANCE_HEADER: "another start"})
    for path in ("/infer/", "/update_flattened_params/", "/process_weights_after_loading/"):
        refused = client.post(path, json={})
        assert refused.status_code == 409, path
        assert "restarted, and has the base model's weights" in refused.json()["detail"]
    closed = client.post("/close_communicator/")
    assert closed.json() == {"message": "The group is closed."}
    same = {wire.INSTANCE_HEADER: routes.INSTANCE}
    assert client.post("/process_weights_after_loading/", headers=same).status_code == 200


def test_replicas_join_the_group_under_their_numbers() -> None:
    two = [Replica(), Replica()]
    client = TestClient(Deployed(*two, timeout=9.0).app)
    asked = {"host": "0.0.0.0", "port": 7, "world_size": 5}
    connecting = client.post("/init_communicator/", json=asked)
    assert connecting.json() == {"message": "The replicas are connecting."}
    wait_until(lambda: all(replica.calls for replica in two))
    assert [replica.commands for replica in two] == [
        [("0.0.0.0", 7, 5, 0, 4.5, True)],
        [("0.0.0.0", 7, 5, 1, 4.5, True)],
    ]
    one = Replica()
    engine = TestClient(Deployed(one, use_async=True).app)
    engine.post("/init_communicator/", json=asked)
    wait_until(lambda: bool(one.calls))
    assert one.commands == [("0.0.0.0", 7, 5, None, 30.0, True)]
    assert engine.get("/get_world_size/").json() == {"world_size": 6}
    assert engine.post("/get_engine_type/").json()[wire.KEY]["replicas"] == 3
    assert groups_of(engine.post("/infer/", json={"infer_requests": [request(0)]})) == [0]
    assert one.calls[-1] == "async_infer"


@pytest.mark.parametrize(
    ("host", "headers", "opens_at"),
    [
        ("0.0.0.0", {}, "127.0.0.1"),
        ("", {}, "127.0.0.1"),
        ("::", {}, "127.0.0.1"),
        ("node7", {}, "127.0.0.1"),
        ("10.0.0.7", {"X-Forwarded-For": "10.0.0.9"}, "10.0.0.7"),
        ("::", {"X-Forwarded-For": "10.0.0.9"}, "0.0.0.0"),
    ],
)
def test_the_weights_store_opens_where_the_training_came_in(
    host: str, headers: dict[str, str], opens_at: str
) -> None:
    """The store asks for no key, so it does not open at every address of the machine. Behind a
    proxy the address of the trainer is not known."""
    replica = Replica()
    deployed = Deployed(replica)
    deployed.args.host = host
    with listening(deployed) as url:
        asked = {"host": "0.0.0.0", "port": 7, "world_size": 2}
        requests.post(f"{url}/init_communicator/", json=asked, headers=headers, timeout=20)
        wait_until(lambda: bool(replica.commands))
    assert replica.commands == [(opens_at, 7, 2, 0, 30.0, True)]


def test_reports_are_those_of_each_worker_of_each_replica() -> None:
    one, two = Replica(), Replica()
    one.reports = [WeightReport({"a": "1"}), WeightReport({"a": "2"})]
    two.reports = [WeightReport({"a": "3"})]
    client = TestClient(Deployed(one, two).app)

    def loaded() -> list[Any]:
        return [report.get("loaded") for report in client.get(routes.REPORTS_PATH).json()]

    for _ in range(2):  # a trainer may ask twice
        assert loaded() == [{"a": "1"}, {"a": "2"}, {"a": "3"}]
    one.faults["read_weight_report"] = "raises"
    assert loaded() == [None, {"a": "3"}]


def test_a_replica_that_refused_an_adapter_draws_no_more() -> None:
    """It generates again once it has taken another adapter. One of its two workers reports a
    refusal."""
    one, two = Replica(number=1), Replica(number=2)
    deployed = Deployed(one, two)
    client = TestClient(deployed.app)
    for refused, draw in (
        ("why", {"replica 2"}),
        ("", {"replica 1", "replica 2"}),
    ):
        one.reports = [WeightReport(), WeightReport(adapter_fault=refused)]
        for connection in deployed.connections:  # its update was answered with 200
            connection.holds_weights = True
        faults = [report["adapter_fault"] for report in client.get(routes.REPORTS_PATH).json()]
        assert faults == ["", refused, ""]
        before = {replica.name: len(replica.groups) for replica in (one, two)}
        answer = client.post("/infer/", json={"infer_requests": [request(i) for i in range(4)]})
        assert groups_of(answer) == [0, 1, 2, 3]
        drew = {r.name for r in (one, two) if len(r.groups) > before[r.name]}
        assert drew == draw


def test_parameter_names_are_those_of_a_worker() -> None:
    client = TestClient(Deployed(Replica(get_state_keys="raises"), Replica()).app)
    assert client.get("/get_model_state_keys/").json() == {"keys": ["model.w"]}
    silent = Replica(get_state_keys="raises")
    assert TestClient(Deployed(silent).app).get("/get_model_state_keys/").json() == {"keys": []}


def test_what_a_server_says_of_itself() -> None:
    deployed = Deployed(Replica(), Replica(number_bits=16))
    deployed.args.new_special_tokens = ["<a>", "<b>"]
    answer = TestClient(deployed.app).post("/get_engine_type/").json()
    assert answer["engine_type"] == "LLMEngine"
    assert answer[wire.KEY] == {
        "version": wire.VERSION,
        "instance": routes.INSTANCE,
        "replicas": 2,
        "new_special_tokens": ["<a>", "<b>"],
        "max_model_len": 512,
        "number_bits": 16,
        "members": ["7.0", "7.0"],
        "starting": 0,
        "batches_follow_arrival": False,
    }


# --- each replica of each server ---


def test_each_answer_names_the_replica_of_the_server_that_drew_it() -> None:
    ends = [[Replica(number=number) for number in range(4)] for _ in range(2)]
    with listening(Deployed(*ends[0])) as first, listening(Deployed(*ends[1])) as second:
        servers = RolloutServers(VLLMInferClient(base_urls=[first, second]), timeout=60.0)
        rows = [request(k, count=1) for k in range(16)]
        metadatas = [metadata for row in rows if (metadata := wire.read_metadata(row["data_dict"]))]
        asked = [RolloutInferRequest(**row) for row in rows]
        answers = servers.infer(asked, metadatas, RequestConfig(max_tokens=8))
        names = [f"server {number} ({url})" for number, url in enumerate((first, second))]
        assert servers.weight_reports() == [
            (f"worker {worker} of {name}", WeightReport({"w": "float32 (1,)"}, faults=[]))
            for name in names
            for worker in range(4)
        ]
    drew = {
        f"{name} {replica.name}": replica.groups
        for name, end in zip(names, ends, strict=True)
        for replica in end
    }
    assert [len(groups) for groups in drew.values()] == [2] * 8
    for group, ([completion], _) in enumerate(answers):
        assert completion.text == f"{group}.0"
        assert group in drew[completion.replica]
