"""The routes of `swift rollout`: every request is spread over replicas, bounded in time, and paired
with its answer; a bad one is refused, and another replica answers for one that fails (F1, F2, F3,
F5). A lost replica is started again, and generates once it holds weights (F4). Bodies are bounded
in size, and parsed in steps as `json.loads` parses them (F2)."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from swift.pipelines.infer import rollout

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.server import bodies, replicas, routes
from swift_grpo_ext.server.lease import OWNER_HEADER
from swift_grpo_ext.server.replicas import Restarts
from tests.rig.server.served import Deployed, Replica, groups_of, listening, request

BODY = {"infer_requests": [request(0)]}
OWNED = {OWNER_HEADER: "runs/a"}
SHORT = {wire.TIMEOUT_HEADER: "1"}
RESETS = ("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("config", "shares"),
    [({"max_tokens": 16}, [[0], [1, 2, 3, 4, 5]]), ({}, [[0, 2, 4], [1, 3, 5]])],
)
def test_groups_go_to_replicas_by_cost(config: Any, shares: list[list[int]]) -> None:
    """A replica with a large group gets no other."""
    two = [Replica(), Replica()]
    answer = Deployed(*two).ask(request(0, count=64), *map(request, range(1, 6)), **config)
    assert groups_of(answer) == list(range(6))
    assert [replica.groups for replica in two] == shares


def test_requests_of_other_clients_go_in_contiguous_slices() -> None:
    """Schedulers of a server may answer with more outputs than requests."""
    two = [Replica(), Replica("answers half")]
    assert groups_of(Deployed(*two).draw(5, as_arrays=False)) == [0, 1, 2, 3]
    assert [replica.groups for replica in two] == [[0, 1, 2], [3, 4]]
    many = [Replica("ends"), *(Replica() for _ in range(6))]
    assert groups_of(Deployed(*many).draw(5, as_arrays=False)) == [0, 1, 2, 3, 4]
    mixed = [request(0) | {"data_dict": {}}, request(1, as_arrays=False)]
    assert groups_of(Deployed(Replica()).ask(*mixed)) == [-1, -1]


OF_ONE_THAT_HANGS = 1.5  # seconds; the other replica needs more than milliseconds if it must wait
FAULTS = {
    "raises": "a replica failed: OSError: the disk is gone",
    "answers nothing": "a replica gave no answers; the log of `swift rollout` tells why",
    "answers half": "a replica gave 3 answers to 4 requests",
    "ends": "a replica has ended (EOFError)",
    "hangs": f"a replica has not answered for {OF_ONE_THAT_HANGS} s (--rollout_timeout)",
    "answers another": "a replica answered message 0, expected 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_replica_cannot_answer_another_does(fault: str) -> None:
    """Without another replica, the cause is named."""
    timeout = OF_ONE_THAT_HANGS if fault == "hangs" else 60.0
    failing, healthy = Replica(fault), Replica()
    both = [failing, healthy] if fault < "c" else [healthy, failing]
    deployed, is_lost = Deployed(*both, timeout=timeout), fault in [*FAULTS][3:]
    for _ in range(2):
        assert groups_of(deployed.draw(8)) == list(range(8))
        assert failing.is_alive() != is_lost
    assert deployed.connections == [healthy.connection] or not is_lost
    named = deployed.client.get("/get_world_size/", headers={wire.MESSAGE_HEADER: "abc"})
    assert named.json() == {"world_size": 2 if is_lost else 4}
    assert named.headers[wire.MESSAGE_HEADER] == "abc"
    failed = Deployed(Replica(fault), timeout=timeout).draw(4)
    assert FAULTS[fault] in failed.json()["detail"]
    assert failed.status_code == (503 if is_lost else 500)


@pytest.mark.parametrize("as_arrays", [True, False])
def test_replicas_that_are_gone_or_wait_for_weights_draw_nothing(as_arrays: bool) -> None:
    none, waiting = Deployed(), Replica()
    refused = none.draw(as_arrays=as_arrays)
    assert (refused.status_code, refused.json()["detail"]) == (503, "it has no replica left")
    assert none.client.get("/health").status_code == 503
    waiting.connection.holds_weights = False
    refused = Deployed(waiting).draw(as_arrays=as_arrays)
    assert (refused.status_code, waiting.groups) == (500, [])
    assert refused.json()["detail"].startswith("its 1 replicas wait for a training's weights")


@pytest.mark.parametrize("method", [*RESETS, "read_number_bits"])
def test_every_call_is_bounded(method: str) -> None:
    """The bound is the owner's if that is shorter than the server's. A stranger's bound ends no
    busy replica."""
    path = "/get_engine_type/" if method == "read_number_bits" else f"/{method}/"
    for headers, status in ((SHORT, 200), (OWNED | SHORT, 503)):
        busy = Replica(**{method: "is late"})
        deployed = Deployed(busy)
        threading.Timer(1.5, busy.goes_on.set).start()
        answer = deployed.client.post(path, headers=headers)
        assert answer.status_code == status
        assert busy.is_alive() == bool(deployed.connections) == (status == 200)
    assert "a replica has not answered for 1 s" in answer.json()["detail"]


def test_a_body_that_never_ends_blocks_nobody() -> None:
    with listening(Deployed(Replica(), timeout=1.5)) as url:
        address = (urlsplit(url).hostname, urlsplit(url).port)
        with socket.create_connection(address) as slow, socket.create_connection(address) as gone:
            for client in (slow, gone):
                client.sendall(b"POST /infer/ HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            gone.close()
            assert groups_of(requests.post(f"{url}/infer/", json=BODY, timeout=10)) == [0]
            slow.settimeout(10)
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_slow_answer_begins_at_once_and_is_given_up_with_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas get `GIVE_UP` again and again, since requests may be on their way to them."""
    slow, told = Replica("is late"), list[float]()

    def give_up() -> None:
        told.append(time.monotonic())
        if len(told) > 1:
            slow.goes_on.set()

    monkeypatch.setattr(replicas, "give_up", give_up)
    monkeypatch.setattr(routes, "SECONDS_BETWEEN_BLANKS", 0.05)
    with listening(Deployed(slow)) as url:
        headers = {wire.STATUS_HEADER: "1"}
        ask = partial(requests.post, f"{url}/infer/", json=BODY, headers=headers, timeout=10)
        answer = ask(stream=True)
        content = answer.iter_content(1)  # kept: the end of this generator closes the connection
        assert [next(content) for _ in range(3)] == [b" "] * 3
        assert not slow.goes_on.is_set()
        answer.close()
        wait_until(slow.goes_on.is_set)
        answer = ask()
        assert answer.headers[wire.STATUS_HEADER]
        status, _, content = answer.content.lstrip().partition(b"\n")
        assert status == b"200"
        assert [one["rollout_infos"]["group"] for one in json.loads(content)] == [0]


def test_a_server_that_is_busy_says_so_and_is_healthy() -> None:
    slow = Replica("is late")
    with listening(Deployed(slow)) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(requests.post, f"{url}/infer/", json=BODY, timeout=20)
        wait_until(lambda: slow.groups == [0])
        busy = requests.post(f"{url}/reset_mm_cache/", headers=OWNED | SHORT, timeout=20)
        assert (busy.status_code, busy.headers["Retry-After"]) == (503, "1")
        assert "busy with another request" in busy.json()["detail"]
        assert requests.get(f"{url}/health/", timeout=15).status_code == 200
        slow.goes_on.set()
        assert groups_of(first.result(20)) == [0]
        reset = requests.post(f"{url}/reset_mm_cache/", headers=OWNED, timeout=20)
        assert reset.json() == {"message": "reset_mm_cache is done."}


def test_a_replica_that_was_lost_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered meanwhile, also if the machine cannot start it. It joins when a
    connected training asks, since a connecting one already has the number of replicas. It generates
    once it has weights. Four restarts are the budget."""
    said: list[str] = []
    monkeypatch.setattr(replicas.logger, "error", said.append)
    monkeypatch.setattr(replicas.logger, "warning", said.append)
    ended, healthy, started = Replica(number=0), Replica(number=1), list[Any]()
    deployed = Deployed(ended, healthy)
    deployed.restarts, deployed.master_port = Restarts(deployed, 4), 5
    ended.kill()

    def start() -> None:
        if len(started) == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def process(target: Any, args: Any) -> Any:
        assert target is rollout.llm_worker
        assert args[:3] == (deployed.args, 0, 5)
        replica = Replica(number=2, child=Connection(os.dup(args[3].connection.fileno())))
        started.append(replica)
        replica.start = start
        return replica

    monkeypatch.setattr(rollout, "Process", process)
    connected = {wire.INSTANCE_HEADER: routes.INSTANCE}

    def told(**headers: str) -> tuple[int, int, int]:
        """Return the numbers of replicas that are used, that may join, and that are ready."""
        answer = deployed.client.post("/get_engine_type/", headers=headers).json()[wire.KEY]
        health = deployed.client.get("/health/").json()
        return answer["replicas"], answer["starting"], health["waiting_for_weights"]

    def drew() -> list[int]:
        before = [len(replica.groups) for replica in (healthy, *started)]
        assert groups_of(deployed.draw(4)) == [0, 1, 2, 3]
        pairs = zip((healthy, *started), before, strict=False)
        return [len(replica.groups) - num for replica, num in pairs]

    assert drew() == [4]
    failed = "Replica 0 could not be started ([Errno 12] Cannot allocate memory): try 1 of 4."
    assert said[1:] == [failed]
    assert told(**connected) == (1, 1, 0)
    assert said[-1] == "Restarting replica 0 (2 of 4)."
    assert told(**connected) == (1, 1, 0)  # it is still loading
    started[1].says({"status": "error", "why": "no memory"})
    assert told() == (1, 1, 1)
    assert told(**connected) == (1, 1, 0)  # and started once more
    assert said[-2] == "Replica 0 did not start: {'status': 'error', 'why': 'no memory'}"
    started[2].kill()
    assert told() == told(**connected) == (1, 1, 0)
    assert said[-2] == "Replica 0 did not start: {'status': 'ended'}"
    started[3].says({"status": "ready"})
    assert told() == (1, 1, 1)
    assert told(**connected) == (2, 0, 0)
    assert [connection.name for connection in deployed.connections] == ["1.0", "0.4"]
    assert drew() == [4, 0, 0, 0, 0]
    loaded = deployed.client.post("/process_weights_after_loading/")
    assert loaded.json() == {"message": "The weights are loaded."}
    assert drew() == [2, 0, 0, 0, 2]
    started[3].kill()
    assert drew() == [4, 0, 0, 0, 0]
    assert told(**connected) == (1, 0, 0)
    assert "Giving up on replica 0 after 4 restarts." in said[-1]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"messages": {"b": "c" * 10_000}}, 422, ["messages", "valid list", "'ccc"]),
        ({"messages": []}, 422, ["messages", "at least 1 item"]),
        ({"messages": [{"content": ""}]}, 422, ["messages", "role", "Field required"]),
        ({"data_dict": {wire.KEY: {"version": 99}}}, 400, ["speaks version 99"]),
        ({"images": [f"data:{'x' * 9},"], "audios": [{"no": "path"}]}, 200, []),
    ],
)
def test_a_bad_request_is_refused(fields: dict[str, Any], status: int, words: list[str]) -> None:
    replica = Replica()
    answer = Deployed(replica).ask(request(0), request(1) | fields)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 2000  # it has the beginning of a value
    assert [word for word in words if word not in answer.text] == []
    assert replica.groups == ([] if words else [0, 1])
    assert ('"infer_requests",1' in answer.text) == (status == 422)


def test_what_cannot_be_encoded_is_tried_once() -> None:
    two = [Replica("cannot encode"), Replica("cannot encode")]
    Deployed(*two).refuse("/infer/", 400, "a replica failed: ValueError: no such image", json=BODY)
    assert sorted(len(replica.groups) for replica in two) == [0, 1]
    assert all(replica.is_alive() for replica in two)


def test_a_server_that_was_started_anew_takes_no_work() -> None:
    """It answers 409 until the trainer has sent weights; calls that need none are answered."""
    server, other = Deployed(replica := Replica()), {wire.INSTANCE_HEADER: "another start"}
    cause = "restarted, and has the base model's weights"
    for path in ("/infer/", "/update_flattened_params/", "/process_weights_after_loading/"):
        server.refuse(path, 409, cause, json={}, headers=other)
    closed = server.client.post("/close_communicator/", headers=other)
    assert closed.json() == {"message": "The group is closed."}
    assert replica.calls == [("close_communicator", ())]


def test_replicas_join_where_the_training_came_in() -> None:
    """They join under their numbers. The weights' store asks for no key, so it does not open at
    every address of the machine. Behind a proxy the address of the trainer is not known."""
    two = [Replica(), Replica()]
    deployed = Deployed(*two, timeout=9.0)
    asked = {"host": "0.0.0.0", "port": 7, "world_size": 5}
    for host, address, headers, opens_at in (
        ("0.0.0.0", "10.0.0.5", {}, "10.0.0.5"),
        ("", "[::1]", {}, "0.0.0.0"),
        ("10.0.0.7", "10.0.0.5", {"X-Forwarded-For": "10.0.0.9"}, "10.0.0.7"),
    ):
        deployed.args.host = host
        client = TestClient(deployed.app, base_url=f"http://{address}")
        client.post("/init_communicator/", json=asked, headers=headers)
        for number, replica in enumerate(two):
            wait_until(lambda replica=replica: bool(replica.calls))  # type: ignore[misc]
            args = (opens_at, 7, 5, number, 4.5, True)
            assert replica.calls.pop() == ("join_group", args)


def test_the_async_engine_has_all_replicas_in_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "batches_follow_arrival", lambda is_async: is_async)
    one = Replica(async_infer="raises")
    engine = Deployed(one, use_async=True)
    engine.client.post("/init_communicator/", json={"host": "h", "port": 7, "world_size": 5})
    wait_until(lambda: bool(one.calls))
    assert one.calls == [("join_group", ("h", 7, 5, None, 30.0, True))]
    assert engine.client.get("/get_world_size/").json() == {"world_size": 6}
    ours = engine.client.post("/get_engine_type/").json()[wire.KEY]
    assert (ours["replicas"], ours["batches_follow_arrival"]) == (3, True)
    assert engine.client.get("/get_model_state_keys/").json() == {"keys": ["model.w"]}


def test_a_replica_that_refused_an_adapter_draws_no_more() -> None:
    """Reports are those of each worker of each replica. Replica 1 generates again once it has taken
    another adapter."""
    one, two = Replica(number=1), Replica(number=2)
    deployed = Deployed(one, two)
    for refused, draw in (("why", [0, 4]), ("", [2, 2])):
        one.reports = [WeightReport({"a": "1"}), WeightReport(adapter_fault=refused)]
        for replica in (one, two):  # its update was answered with 200
            replica.connection.holds_weights = True
            replica.groups.clear()
        for _ in range(2):  # a trainer may ask twice
            reports = deployed.client.get(routes.REPORTS_PATH).json()
            assert [report["adapter_fault"] for report in reports] == ["", refused, ""]
        assert groups_of(deployed.draw(4)) == [0, 1, 2, 3]
        assert [len(replica.groups) for replica in (one, two)] == draw
    one.faults["read_weight_report"] = "raises"
    first, second = deployed.client.get(routes.REPORTS_PATH).json()
    assert (first, second["loaded"]) == ({}, {"w": "float32 (1,)"})


# --- bodies ---


def test_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that is too large is refused by size and limit. The client reads this although it is
    still sending. Waiting bodies count, since they are in memory. Once they are answered or have
    failed, another one is accepted."""
    monkeypatch.setattr(bodies, "MAX_BYTES", 2**20)
    replica, as_json = Replica("is late"), {"Content-Type": "application/json"}
    body, large = (
        json.dumps({"infer_requests": [request(0) | {"images": ["A" * size]}]}).encode()
        for size in (600_000, 4_000_000)
    )
    with listening(Deployed(replica)) as url, ThreadPoolExecutor(1) as pool:

        def post(data: Any, path: str = "infer") -> requests.Response:
            return requests.post(f"{url}/{path}/", data=data, headers=as_json, timeout=60)

        slow = pool.submit(post, body)
        while not replica.groups:
            time.sleep(0.01)
        # An iterator is sent without a length.
        for refused in (post(large), post(iter([large])), post(large, "init_communicator")):
            assert refused.status_code == 413
            expected = f"a body of {len(large):,} bytes; expected at most 1,048,576, an eighth of"
            assert refused.json()["detail"].startswith(expected)
        for data in (body, iter([body])):
            refused = post(data)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert f"of {len(body):,} bytes beside those of other" in refused.json()["detail"]
        replica.faults["infer"] = ""
        replica.goes_on.set()
        assert slow.result(60).ok
        for sent in (b"{", body, body):
            assert post(sent).status_code == (200 if sent is body else 422)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.none() | st.integers(0, 50))
@pytest.mark.parametrize("junk", [b"", b",}", b"01]", b" 1", b"\xff"])
def test_steps_read_and_refuse_what_json_does(
    junk: bytes, value: Any, indent: int | None, is_ascii: bool, end: int | None
) -> None:
    sent = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    if end is not None:
        sent = sent[:end] + junk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "LARGE", 0)
        try:
            expected = json.loads(sent)
        except ValueError:
            with pytest.raises(ValueError, match=r"\S"):
                bodies.parse(sent)
        else:
            assert bodies.parse(sent) == expected
