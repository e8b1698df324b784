"""Messages that are not what they should be: read right, or refused with a `WireError`."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import (
    Completion,
    RequestMetadata,
    WireError,
    pack,
    pack_answer,
    read_metadata,
    unpack_answer,
)
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE, SampleId
from tests.fuzz.cases import fuzz, json_like, no_hang

PLACE = SampleId(phase="train", step=12, number=0, group=5, index=0)
METADATA = RequestMetadata(sample_id=PLACE, count=2, run_seed=42, packed=True, stop_token_ids=(7,))
COMPLETIONS = [
    Completion(text="七", token_ids=[1, 2, 3], logprobs=[-1.0, -0.5, 0.0], finish_reason="stop"),
    Completion(text="", token_ids=[9], logprobs=[-2.0], finish_reason="length", stop_reason=7),
]
ANSWER = pack_answer(COMPLETIONS, [5, 6], "replica 0")
MESSAGE = METADATA.to_wire()

huge = st.sampled_from([2**14 + 1, 2**31, 2**63, 2**64, 10**9, 10**30, -(10**30), 1e300])
packed = st.one_of(
    st.binary(max_size=24).map(lambda content: base64.b64encode(content).decode()),
    st.text(max_size=8),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6).map(lambda ids: pack(ids, "<i4")),
)
junk = st.one_of(json_like, huge, packed, st.lists(huge | json_like, max_size=3))


@st.composite
def mutated(draw: st.DrawFn, message: dict[str, Any]) -> Any:
    """A message of ours, in which up to three things are others, missing or too many."""
    result: Any = json.loads(json.dumps(message))
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(list(_places(result))))
        change = draw(st.sampled_from(["replace", "drop", "add", "cut"]))
        if change == "replace":
            parent[key] = draw(junk)
        elif change == "drop":
            del parent[key]
        elif change == "add" and isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = draw(junk)
        elif change == "add":
            parent.insert(key, copy.deepcopy(parent[key]))
        elif isinstance(parent[key], (str, list)):
            parent[key] = parent[key][: draw(st.integers(0, len(parent[key])))]
        if not isinstance(result, dict) or not result:
            break
    return result


def _places(value: Any) -> Any:
    """Every (container, key) of a message."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def or_refusal(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except WireError as e:
        return e


@fuzz
@given(mutated(MESSAGE) | json_like)
@example({**MESSAGE, "count": 10**9})
@example({**MESSAGE, "place": {**MESSAGE["place"], "index": MAX_GROUP_SIZE}})
@example({**MESSAGE, "lean": "false"})
@example({**MESSAGE, "count": True})
def test_an_envelope_is_usable_or_refused(message: Any) -> None:
    with no_hang():
        metadata = or_refusal(lambda: read_metadata({wire.KEY: message}))
    if isinstance(metadata, WireError):
        assert "a request" in str(metadata).lower()
        return
    if metadata is None:
        assert message is None
        return
    # What the engine does with it: a seed and a number of samples that vLLM takes.
    assert 1 <= metadata.count <= MAX_GROUP_SIZE
    assert metadata.seed is None or 0 <= metadata.seed < 2**63 - metadata.count
    assert type(metadata.count) is int
    assert type(metadata.packed) is type(metadata.include_stop_str_in_output) is bool
    assert all(type(i) is int and 0 <= i < 2**31 for i in metadata.stop_token_ids)
    assert metadata.next_turn().sample_id.turn == metadata.sample_id.turn + 1
    assert read_metadata({wire.KEY: metadata.to_wire()}) == metadata


@fuzz
@given(mutated(ANSWER) | json_like)
@example({**ANSWER, "texts": [7, None]})
@example({**ANSWER, "lengths": [10**30, -(10**30) + 4]})
@example({**ANSWER, "token_ids": pack([-1, 2, 3, 9], "<i4")})
@example({**ANSWER, "extras": ["x", 7]})
def test_an_answer_is_usable_or_refused(answer: Any) -> None:
    with no_hang():
        read = or_refusal(lambda: unpack_answer(answer, METADATA, "server 1"))
    if isinstance(read, WireError):
        assert str(read).startswith("server 1 ")
        return
    completions, prompt_token_ids = read
    assert len(completions) == METADATA.count
    for completion in completions:
        assert isinstance(completion.text, str)
        assert isinstance(completion.finish_reason, (str, type(None)))
        assert isinstance(completion.stop_reason, (str, int, type(None)))
        assert isinstance(completion.extra, (dict, type(None)))
        logprobs = completion.logprobs
        assert logprobs is None or len(logprobs) == len(completion.token_ids)
        assert all(i >= 0 for i in completion.token_ids)
    assert all(i >= 0 for i in prompt_token_ids)
