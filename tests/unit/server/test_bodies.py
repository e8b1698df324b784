"""Bodies are bounded in size, and parsed in steps as `json.loads` parses them (F2)."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from swift_grpo_ext.server import bodies
from tests.rig.server.served import Deployed, Replica, listening, request

AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BYTES", 2**20)


def test_bodies_are_bounded_together() -> None:
    """A body that is too large is refused by size and limit. The client reads this although it is
    still sending. Waiting bodies count, since they are in memory. Once they are answered or have
    failed, another one is accepted."""
    replica = Replica("is late")
    body, large = (
        json.dumps({"infer_requests": [request(0) | {"images": ["A" * size]}]}).encode()
        for size in (600_000, 4_000_000)
    )
    with listening(Deployed(replica)) as url, ThreadPoolExecutor(1) as pool:

        def post(data: Any, path: str = "infer") -> requests.Response:
            return requests.post(f"{url}/{path}/", data=data, headers=AS_JSON, timeout=60)

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
