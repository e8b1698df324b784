"""What travels: read as it was written, refused when it is not ours, and small (SPEC G6, M6)."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import (
    Completion,
    RequestMetadata,
    WireError,
    pack,
    pack_answer,
    read_metadata,
    unpack,
    unpack_answer,
    write_metadata,
)
from swift_grpo_ext.sampling.seeding import PHASES, SampleId, sample_seed

PLACE = SampleId(phase="train", step=12, number=0, group=5, index=0)
METADATA = RequestMetadata(sample_id=PLACE, count=2, run_seed=42, packed=True)
WIRE = METADATA.to_wire()

metadatas = st.builds(
    RequestMetadata,
    sample_id=st.builds(
        SampleId,
        phase=st.sampled_from(PHASES),
        step=st.integers(0, 10**6),
        number=st.integers(0, 20),
        group=st.integers(0, 10**5),
        index=st.integers(0, 2**14 - 1),
        turn=st.integers(0, 20),
    ),
    count=st.integers(1, 2**14),
    run_seed=st.none() | st.integers(0, 2**32 - 1),
    packed=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
    replica=st.none() | st.integers(0, 100),
)
float32s = st.floats(width=32)  # NaN and infinities too
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=8,
)  # fmt: skip


def over_http(message: Any) -> Any:
    return json.loads(json.dumps(message))


# --- envelopes ---


@settings(deadline=None)
@given(metadatas)
def test_an_envelope_is_read_as_it_was_written(metadata: RequestMetadata) -> None:
    data_dict: dict[str, Any] = {"solution": "七"}
    write_metadata(data_dict, metadata)
    received = over_http(data_dict)
    assert read_metadata(received) == metadata
    assert received["solution"] == "七"


@settings(deadline=None)
@given(metadatas, st.integers(0, 100))
def test_seeds_survive_the_journey(metadata: RequestMetadata, k: int) -> None:
    """S2: the engine finds the seeds that the place of each sample has."""
    data_dict: dict[str, Any] = {}
    write_metadata(data_dict, metadata)
    received = read_metadata(over_http(data_dict))
    assert received is not None
    if metadata.run_seed is None:
        assert received.seed is received.seed_of(k) is None
    else:
        assert received.seed == sample_seed(metadata.run_seed, metadata.sample_id)
        assert received.seed_of(k) == received.seed + k


def test_the_next_turn_has_its_own_seeds() -> None:
    later = METADATA.next_turn()
    assert later == replace(METADATA, sample_id=replace(PLACE, turn=1))
    assert later.next_turn().sample_id.turn == 2
    assert later.seed != METADATA.seed


@pytest.mark.parametrize("data_dict", [None, {}, {"solution": "7"}, {wire.KEY: None}])
def test_a_request_without_an_envelope_has_none(data_dict: dict[str, Any] | None) -> None:
    assert read_metadata(data_dict) is None


def test_stop_settings_have_specs_defaults() -> None:
    assert (METADATA.stop_token_ids, METADATA.include_stop_str_in_output) == ((), True)


@pytest.mark.parametrize("version", [0, 3, "4", None])
def test_another_version_is_refused_with_the_remedy(version: Any) -> None:
    message = (
        rf"a request speaks version {version!r} of swift-grpo-ext's wire format, this side speaks "
        r"4: load the same version of the plugin in `swift rlhf` and `swift rollout`"
    )
    with pytest.raises(WireError, match=message):
        read_metadata({wire.KEY: {**WIRE, "version": version}})


@pytest.mark.parametrize("message", ["1", 1, [], ["version"]])
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(WireError, match="a request speaks version None"):
        read_metadata({wire.KEY: message})


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 0},
        {"count": -1},
        {"count": "2"},
        {"count": 2.0},
        {"count": None},
        {"run_seed": -1},
        {"run_seed": "42"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["7"]},
        {"stop_token_ids": "7"},
        {"stop_token_ids": 7},
        {"replica": -1},
        {"replica": "1"},
        {"replica": True},
        {"sample_id": None},
        {"sample_id": "train-12.0-5-0"},
        {"sample_id": {}},
        {"sample_id": {**WIRE["sample_id"], "rank": 0}},
        {"sample_id": {**WIRE["sample_id"], "phase": "test"}},
        {"sample_id": {**WIRE["sample_id"], "phase": ["train"]}},
        {"sample_id": {**WIRE["sample_id"], "step": "12"}},
        {"sample_id": {**WIRE["sample_id"], "group": -5}},
    ],
)
def test_a_malformed_envelope_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=f"A request's {wire.KEY} is malformed"):
        read_metadata({wire.KEY: {**WIRE, **changes}})


@pytest.mark.parametrize("field", sorted(set(WIRE) - {"version"}))
def test_an_envelope_with_a_field_missing_is_refused(field: str) -> None:
    message = {name: value for name, value in WIRE.items() if name != field}
    with pytest.raises(WireError, match=f"A request's {wire.KEY} is malformed.*{field}"):
        read_metadata({wire.KEY: message})


junk = st.one_of(
    json_values,
    st.builds(lambda values: {**WIRE, **values}, st.dictionaries(st.sampled_from(list(WIRE)),
                                                                 json_values)),
    st.builds(lambda values: {**WIRE, "sample_id": {**WIRE["sample_id"], **values}},
              st.dictionaries(st.sampled_from(list(WIRE["sample_id"])), json_values)),
)  # fmt: skip
"""No message, and messages that are wrong here and there."""


@settings(deadline=None, max_examples=200)
@given(junk)
def test_junk_is_refused_and_nothing_else_happens(message: Any) -> None:
    """An envelope, or none, or a `WireError`: what is read has a seed."""
    try:
        metadata = read_metadata({wire.KEY: message})
    except WireError:
        return
    if metadata is None:
        assert message is None
    elif metadata.sample_id.index < 2**14:
        assert (metadata.seed is None) == (metadata.run_seed is None)


# --- packed numbers ---


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_whole_numbers_travel_exactly(values: list[int]) -> None:
    found = unpack(over_http(pack(values, "<i4")), "<i4").tolist()
    assert found == values
    assert {type(value) for value in found} <= {int}


@settings(deadline=None)
@given(st.lists(float32s))
def test_float32_numbers_travel_exactly(values: list[float]) -> None:
    """Compared by `repr`, which tells 0 from -0, and takes NaN for NaN."""
    found = unpack(over_http(pack(values, "<f4")), "<f4").tolist()
    assert list(map(repr, found)) == list(map(repr, values))


def test_the_packed_form_is_little_endian_on_every_machine() -> None:
    assert pack([1, 258], "<i4") == "AQAAAAIBAAA="
    assert pack([-0.5], "<f4") == "AAAAvw=="


def test_a_number_too_large_is_refused_not_cut() -> None:
    with pytest.raises(OverflowError, match="out of bounds for int32"):
        pack([2**31], "<i4")


# --- answers ---


def completion(text: str, token_ids: list[int], **changes: Any) -> Completion:
    logprobs = [-0.5 * (i + 1) for i in range(len(token_ids))]
    values = {"logprobs": logprobs, "finish_reason": "stop", **changes}
    return Completion(text=text, token_ids=token_ids, **values)


ANSWER = pack_answer([completion("七", [7, 2]), completion("八九", [8, 9, 2])], [1, 5], "replica 1")


@st.composite
def answers(draw: st.DrawFn) -> list[Completion]:
    """Of one engine: with log-probabilities, or without."""
    has_logprobs = draw(st.booleans())

    def one(
        text: str, token_ids: list[int], finish_reason: str | None, stop_reason: str | int | None
    ) -> Completion:
        finite = st.floats(max_value=0, width=32, allow_nan=False)
        count = len(token_ids)
        logprobs = draw(st.lists(finite, min_size=count, max_size=count)) if has_logprobs else None
        reasons = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        return completion(text, token_ids, logprobs=logprobs, **reasons)

    ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
    reasons = st.sampled_from(["stop", "length", None])
    stops = st.none() | st.text(max_size=3) | st.integers(0, 2**31 - 1)
    sample = st.tuples(st.text(max_size=8), ids, reasons, stops)
    samples = st.lists(sample, min_size=1, max_size=5)
    return [one(*sample) for sample in draw(samples)]


def listed(found: Completion) -> Completion:
    """With lists instead of arrays, which have no `==` of their own."""
    logprobs = None if found.logprobs is None else np.asarray(found.logprobs).tolist()
    return replace(found, token_ids=np.asarray(found.token_ids).tolist(), logprobs=logprobs)


@settings(deadline=None)
@given(answers(), st.lists(st.integers(0, 2**31 - 1), max_size=5), metadatas)
def test_an_answer_is_read_as_it_was_packed(
    completions: list[Completion], prompt_ids: list[int], metadata: RequestMetadata
) -> None:
    """Empty completions, Chinese text, no log-probabilities: all as they were."""
    metadata = replace(metadata, count=len(completions))
    answer = over_http(pack_answer(completions, prompt_ids, "replica 1"))
    found, found_prompt_ids = unpack_answer(answer, metadata, "server 0 (http://a:8000)")
    assert [listed(c) for c in found] == [
        replace(c, seed=metadata.seed_of(k), replica="server 0 (http://a:8000) replica 1")
        for k, c in enumerate(completions)
    ]
    assert found_prompt_ids == prompt_ids


def test_chinese_text_and_an_empty_completion() -> None:
    completions = [completion("数字是 7。😀", [7, 2]), completion("", [], finish_reason="length")]
    answer = over_http(pack_answer(completions, [1], "replica 0"))
    found, prompt_ids = unpack_answer(answer, METADATA, "server 0")
    assert [(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in map(listed, found)] == [
        ("数字是 7。😀", [7, 2], [-0.5, -1.0], "stop"),
        ("", [], [], "length"),
    ]
    assert prompt_ids == [1]


def test_without_logprobs_there_are_none() -> None:
    completions = [completion("七", [7], logprobs=None), completion("八", [8], logprobs=None)]
    answer = over_http(pack_answer(completions, None, "replica 0"))
    found, prompt_ids = unpack_answer(answer, METADATA, "server 0")
    assert [c.logprobs for c in found] == [None, None]
    assert prompt_ids == []


def test_seldom_fields_stay_with_their_sample() -> None:
    completions = [completion("七", [7]), completion("八", [8], extra={"routed_experts": "x"})]
    found, _ = unpack_answer(over_http(pack_answer(completions, [], "r")), METADATA, "server 0")
    assert [c.extra for c in found] == [None, {"routed_experts": "x"}]


def test_the_seed_and_the_replica_of_a_sample_are_known() -> None:
    found, _ = unpack_answer(ANSWER, METADATA, "server 3")
    first = sample_seed(42, PLACE)
    assert [(c.seed, c.replica) for c in found] == [
        (first, "server 3 replica 1"),
        (first + 1, "server 3 replica 1"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [2]}, r"with .*samples of .* tokens, 5 in all"),
        ({"texts": ["七"]}, r"with .*samples of .* tokens, 5 in all"),
        ({"finish_reasons": ["stop"] * 3}, r"with .*samples of .* tokens, 5 in all"),
        ({"stop_reasons": [None]}, r"with .*samples of .* tokens, 5 in all"),
        ({"lengths": [2, 2]}, r"with \[2\] samples of \[2, 2\] tokens, 5 in all"),
        ({"token_ids": pack([7, 2, 8], "<i4")}, r"with \[2\] samples of \[2, 3\] tokens, 3 in all"),
        ({"logprobs": pack([-0.5] * 4, "<f4")}, r"with 5 tokens and 4 log-probabilities"),
        ({"lengths": [6, -1]}, r"with \[2\] samples of \[6, -1\] tokens"),
        ({"token_ids": "!!"}, r"with nonsense: Error"),
        ({"token_ids": "AAA="}, r"with nonsense: ValueError"),
        ({"lengths": None}, r"with nonsense: TypeError"),
        ({"extras": [None]}, r"with \[1, 2\] samples"),
        ({"logprobs": ""}, r"with 5 tokens and 0 log-probabilities"),
    ],
)
def test_counts_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    """M6: the server and the sample's place are named."""
    sample_id = r"server 0 \(http://a:8000\) answered .*step=12, number=0, group=5, index=0"
    with pytest.raises(WireError, match=f"{sample_id}.* {message}"):
        unpack_answer({**ANSWER, **changes}, METADATA, "server 0 (http://a:8000)")


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_samples_than_asked_for_is_refused(count: int) -> None:
    with pytest.raises(WireError, match=rf"server 0 answered .*count={count}.* with \[2\] samples"):
        unpack_answer(ANSWER, replace(METADATA, count=count), "server 0")


def test_an_answer_of_another_version_names_the_server() -> None:
    with pytest.raises(WireError, match=r"server 0 speaks version 1 .* this side speaks 4"):
        unpack_answer({**ANSWER, "version": 1}, METADATA, "server 0")


def test_an_answer_is_less_than_a_quarter_of_ms_swifts() -> None:
    """G6, against the form of ms-swift 4.6 (`InferEngine._get_logprobs`), same numbers."""
    rng = random.Random(0)
    words = ["the", " number", " is", " 7", ".", " 因此", "答案", " \n", "</think>", "ing"]
    tokens = [rng.choice(words) for _ in range(2000)]
    token_ids = [rng.randrange(150_000) for _ in tokens]
    logprobs = [-rng.expovariate(2.0) for _ in tokens]
    text = "".join(tokens)
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode())}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    theirs = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "token_ids": token_ids,
    }
    sample = completion(text, token_ids, logprobs=logprobs)
    ours = pack_answer([sample], [], "replica 0")

    def size(message: Any) -> int:
        return len(json.dumps(message, ensure_ascii=False).encode())

    assert size(ours) < 0.25 * size(theirs)
    assert size(ours) - size(text) < 11 * len(tokens)
