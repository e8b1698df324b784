"""Messages between trainer and server are small, and read as they were written or refused (S2, G6,
M6)."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import (
    Answer,
    Completion,
    Prompt,
    RequestMetadata,
    WireError,
    read_answer,
    read_metadata,
    to_base64,
    write_answer,
    write_metadata,
)
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed

PLACE = SampleId(phase="train", step=12, number=0, group=5, index=0)
METADATA = RequestMetadata(sample_id=PLACE, count=2, run_seed=42, as_arrays=True)
DATA_DICT: dict[str, Any] = {}
write_metadata(DATA_DICT, METADATA)
WIRE = DATA_DICT[wire.KEY]
SERVER = "server 0 (http://a:8000)"


def test_metadata_are_read_as_they_were_written() -> None:
    """The engine gets the seed of each sample's place."""
    place = SampleId(phase="eval", step=12, number=3, group=5, index=1, turn=2)
    whole = RequestMetadata(
        sample_id=place,
        count=2**14,
        run_seed=42,
        as_arrays=False,
        stop_token_ids=(0, 2**31 - 1),
        include_stop_str_in_output=False,
    )
    unseeded = replace(whole, run_seed=None)
    for metadata in (METADATA, whole, unseeded):
        data_dict: dict[str, Any] = {"solution": "七"}
        write_metadata(data_dict, metadata)
        assert data_dict["solution"] == "七"
        assert read_metadata(json.loads(json.dumps(data_dict))) == metadata
    assert whole.seed_of(3) == sample_seed(42, place) + 3
    assert unseeded.seed_of(3) is None
    for without in (None, {}, {"solution": "7"}, {wire.KEY: None}):
        assert read_metadata(without) is None


@pytest.mark.parametrize(
    ("message", "version"),
    [({**WIRE, "version": 4}, 4), (["version"], None), ({}, None)],
)
def test_another_version_is_refused_with_the_remedy(message: Any, version: Any) -> None:
    speaks = rf"speaks version {version!r} .* {wire.VERSION}: load the same version of the"
    with pytest.raises(WireError, match=f"a request {speaks}"):
        read_metadata({wire.KEY: message})
    with pytest.raises(WireError, match=f"server 0 {speaks}"):
        read_answer(message, METADATA, "server 0")


@pytest.mark.parametrize(
    "changes",
    [
        *({"count": count} for count in (0, "2", 2**14 + 1)),
        {"run_seed": -1},
        *({"stop_token_ids": ids} for ids in ([-1], [2**31])),
        {"sample_id": {**WIRE["sample_id"], "index": 2**14}},
        {"sample_id": {1, 2}},  # of a colocated request: no JSON
    ],
)
def test_malformed_metadata_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=f"A request's {wire.KEY} is malformed \\("):
        read_metadata({wire.KEY: {**WIRE, **changes}})


def test_numbers_are_little_endian_on_every_machine() -> None:
    assert to_base64([1, 258], "<i4") == "AQAAAAIBAAA="
    assert to_base64([-0.5], "<f4") == "AAAAvw=="
    assert len(to_base64([0] * 3000, "<i4")) == 16_000  # G6: 5.4 characters a number


def completion(text: str, token_ids: list[int], **changes: Any) -> Completion:
    logprobs = [-0.5 * (i + 1) for i in range(len(token_ids))]
    values = {"logprobs": logprobs, "finish_reason": "stop", "replica": "replica 1", **changes}
    return Completion(text=text, token_ids=token_ids, **values)


ANSWER = write_answer(
    Answer([completion("七", [7, 2]), completion("八九", [8, 9, 2])], Prompt([1, 5]))
)


def listed(found: Completion) -> Completion:
    """Return a completion with lists in place of arrays, to compare by `==`."""
    logprobs = None if found.logprobs is None else np.asarray(found.logprobs).tolist()
    return replace(found, token_ids=np.asarray(found.token_ids).tolist(), logprobs=logprobs)


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_an_answer_is_read_as_it_was_written(has_logprobs: bool) -> None:
    completions = [
        completion("", [], finish_reason=None),
        completion("七", [7, 2**31 - 1], stop_reason="七", routed_experts={"shape": [2]}),
        completion("八", [0, 5, 2], finish_reason="length", stop_reason=2),
    ]
    if not has_logprobs:
        completions = [replace(c, logprobs=None) for c in completions]
    positions = np.array([[0, 7], [0, 1], [0, 2]], dtype=np.int32)
    for run_seed, prompt in ((42, Prompt([1, 5], positions)), (None, Prompt([]))):
        metadata = replace(METADATA, count=3, run_seed=run_seed)
        sent = json.dumps(write_answer(Answer(completions, prompt)))
        found, found_prompt = read_answer(json.loads(sent), metadata, SERVER)
        assert [listed(c) for c in found] == [
            replace(c, seed=metadata.seed_of(k), replica=f"{SERVER} replica 1")
            for k, c in enumerate(completions)
        ]
        assert found_prompt.token_ids == prompt.token_ids
        assert np.array_equal(found_prompt.positions, prompt.positions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": ["七"]}, r"count=2.* with nonsense: .*\[1, 2\] samples"),
        ({"finish_reasons": ["stop"] * 3}, r"\[2, 3\] samples"),
        ({"stop_reasons": [None]}, r"\[1, 2\] samples"),
        ({"routed_experts": [None]}, r"\[1, 2\] samples"),
        ({"token_ids": to_base64([7], "<i4")}, r"of \[2, 3\] tokens, 1 token ids and 5 log-prob"),
        ({"logprobs": to_base64([-0.5] * 4, "<f4")}, r"5 token ids and 4 log-probabilities in all"),
        ({"lengths": [6, -1]}, r"\[2\] samples of \[6, -1\] tokens"),
        ({"token_ids": "!!"}, r"with nonsense: Error"),
        ({"lengths": None}, r"with nonsense: TypeError"),
        ({"prompt_positions": to_base64([1, 2], "<i4")}, r"with nonsense: ValueError"),
    ],
)
def test_counts_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    """The server and the sample's place are named."""
    sample_id = r"server 0 \(http://a:8000\) answered .*step=12, number=0, group=5, index=0"
    with pytest.raises(WireError, match=f"{sample_id}.*{message}"):
        read_answer({**ANSWER, **changes}, METADATA, SERVER)
