"""The server answers others while it reads a large body."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.ranks import RolloutError
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import bodies
from swift_grpo_ext.server.client import RolloutServers
from swift_grpo_ext.upstream.patches import PatchPhase, apply
from tests.rig.server.forked import deployed, use_fork
from tests.rig.server.served import Deployed, Replica, listening, request


def body_of(images: list[str]) -> bytes:
    return json.dumps({"infer_requests": [request(0) | {"images": images}]}).encode()


def in_parts(body: bytes) -> Iterator[bytes]:
    """Yield parts of a body, which is then sent without a length."""
    yield from (body[i : i + 2**20] for i in range(0, len(body), 2**20))


# --- size ---


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_that_is_too_large_is_refused(
    has_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every route refuses it by size and limit. The client reads this although it is still
    sending."""
    monkeypatch.setattr(bodies, "MAX_BYTES", 2**20)
    replica, large = Replica(), body_of(["A" * 20_000_000])
    headers = {"Content-Type": "application/json"}
    with listening(Deployed(replica)) as url:
        for path in ("/infer/", "/get_engine_type/", "/init_communicator/"):
            data: Any = large if has_length else in_parts(large)
            refused = requests.post(url + path, data=data, headers=headers, timeout=60)
            assert refused.status_code == 413, path
            expected = f"a body of {len(large):,} bytes; expected at most 1,048,576, an eighth of"
            assert refused.json()["detail"].startswith(expected)
        small = body_of(["A" * 2**19])
        assert requests.post(f"{url}/infer/", data=small, headers=headers, timeout=60).ok
    assert replica.groups == [0]


def test_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting bodies count, since they are in memory. Once they are answered or have failed,
    another one is accepted."""
    monkeypatch.setattr(bodies, "MAX_BYTES", 2**20)
    replica, body = Replica("is late"), body_of(["A" * 600_000])
    headers = {"Content-Type": "application/json"}
    with listening(Deployed(replica)) as url, ThreadPoolExecutor(1) as pool:

        def post(data: Any) -> requests.Response:
            return requests.post(f"{url}/infer/", data=data, headers=headers, timeout=60)

        slow = pool.submit(post, body)
        while not replica.groups:
            time.sleep(0.01)
        assert post(body_of(["A" * 2_000_000])).status_code == 413
        for data in (body, in_parts(body)):
            refused = post(data)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            expected = f"a body of {len(body):,} bytes beside those of other requests; expected at "
            assert refused.json()["detail"].startswith(f"{expected}most 1,048,576, an eighth of")
        replica.faults["infer"] = ""
        replica.goes_on.set()
        assert slow.result(60).ok
        for sent in (b"{", body, body):
            assert post(sent).status_code == (200 if sent is body else 422)


def test_a_training_is_told_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends: no server would take these rows. No server counts as lost."""
    monkeypatch.setattr(bodies, "MAX_BYTES", 2**20)
    replica, row = Replica(), request(0) | {"images": ["A" * 20_000_000]}
    metadata: Any = wire.read_metadata(row["data_dict"])
    with listening(Deployed(replica)) as url:
        servers = RolloutServers(VLLMInferClient(base_urls=[url]), timeout=60.0)
        with pytest.raises(RolloutError, match=r"refused the request \(413\): .*1,048,576"):
            servers.infer([RolloutInferRequest(**row)], [metadata], RequestConfig())
    assert replica.groups == []


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_limit_follows_the_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It depends on the memory of the machine or its container. A thousand images of 1 MB pass."""
    assert 2**28 < bodies.MAX_BYTES < 2**43
    monkeypatch.setattr(bodies, "CONTROL_GROUPS", tmp_path)
    of_machine = bodies.memory_bytes()
    limit = tmp_path / name
    limit.parent.mkdir(exist_ok=True)
    for text, expected in (("max", of_machine), (f"{2**62}", of_machine), (f"{2**29}", 2**29)):
        limit.write_text(f"{text}\n")
        assert bodies.memory_bytes() == expected


@pytest.mark.parametrize("num_images", [1, 400])
def test_health_is_not_held_up_while_a_large_body_arrives(
    num_images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 400 MB is read, parsed, checked and passed to a replica. The bound is in CPU
    seconds of this process between two answers. It does not hold beside many other processes on few
    cores, where all threads wait for one another."""
    apply(PatchPhase.SERVER)
    use_fork(monkeypatch)
    has_ended, spent = threading.Event(), []
    body = body_of(["A" * (400_000_000 // num_images)] * num_images)
    with deployed([1], 300.0, None, 0) as (_, [url]):

        def ask() -> None:
            while not has_ended.is_set():
                start = time.process_time()
                assert requests.get(f"{url}/health/", timeout=60).ok
                spent.append(time.process_time() - start)
                time.sleep(0.01)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        headers = {"Content-Type": "application/json"}
        answer = requests.post(f"{url}/infer/", data=body, headers=headers, timeout=300)
        has_ended.set()
        asking.join(60)
    assert (answer.status_code, len(answer.json())) == (200, 1)
    assert max(spent) < 1.0


# --- parsing ---

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_steps_read_what_json_reads(value: Any, indent: int | None, is_ascii: bool) -> None:
    sent = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "LARGE", 0)
        assert bodies.parse(sent) == json.loads(sent) == value


@pytest.mark.parametrize(
    "sent",
    [b"", b"{", b'{"a": 1,}', b'["a', b"[1 2]", b'{"a" 1}', b"[01]", b"nul", b"1 2", b"\xff"],
)
def test_what_is_no_json_is_refused_alike(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    for large in (2**24, 0):
        monkeypatch.setattr(bodies, "LARGE", large)
        headers = {"Content-Type": "application/json"}
        answer = TestClient(Deployed(Replica()).app).post("/infer/", content=sent, headers=headers)
        refused.append((answer.status_code, answer.json()))
    assert refused[0] == refused[1]
    assert refused[0][0] in (400, 422)


def test_a_refusal_holds_the_beginning_of_a_value() -> None:
    """The refusal shows the beginning of the first bad row's value, not all of both."""
    client = TestClient(Deployed(Replica()).app)
    rows = [{"messages": "a" * 10_000_000}] * 10 + [{"messages": {"b": "c" * 10_000_000}}]
    refused = client.post("/infer/", json={"infer_requests": rows})
    assert refused.status_code == 422
    [fault] = refused.json()["detail"]
    assert fault["loc"] == ["body", "infer_requests", 0, "messages"]
    assert fault["input"].startswith("'aaa")
    assert len(refused.content) < 1000
