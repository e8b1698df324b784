"""Bodies are bounded in size, and `/health` answers while a large one is read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.ranks import RolloutError
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import bodies
from swift_grpo_ext.server.client import RolloutServers
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
