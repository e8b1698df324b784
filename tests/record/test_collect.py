"""What a rollout returned becomes a row of the sample log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
)
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.record.row import SampleRow, media_name, sample_row
from swift_grpo_ext.sampling.seeding import SampleId

NAME = SampleId(phase="train", step=3, number=0, group=1, index=2)


def output(ids: list[int], logprobs: Any = None, text: str = "七", **fields: Any) -> RolloutOutput:
    choice = ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content=text),
        finish_reason="stop",
        logprobs=logprobs,
        token_ids=ids,
    )
    response = ChatCompletionResponse("", [choice], UsageInfo(1, 1, 2))
    return RolloutOutput(response=response, **fields)


def row_of(out: RolloutOutput) -> SampleRow:
    sample = OnPolicySample(
        [{"role": "user", "content": "几?"}], images=[{"path": "a.png", "bytes": None}]
    )
    return sample_row(NAME, sample, out, seed=7, fingerprint="f" * 32, rank=1, weight_version=3)


def test_an_answer_of_one_turn() -> None:
    infos = {"seed": 7, "replica": "server 0 replica 1", "stop_reason": 5}
    row = row_of(output([5, 6], rollout_logprobs=[[-0.5, -1.5]], rollout_infos=infos))
    assert (row.token_ids, row.logprobs) == ([5, 6], [-0.5, -1.5])
    assert (row.text, row.finish_reason, row.seed, row.rank) == ("七", "stop", 7, 1)
    assert (row.replica, row.media, row.stop_reason) == ("server 0 replica 1", ["a.png"], "5")
    assert row.prompt == '[{"role": "user", "content": "几?"}]'
    content = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    row = row_of(output([5, 6], logprobs={"content": content}))  # as ms-swift itself answers
    assert (row.logprobs, row.replica, row.stop_reason) == ([-0.5, -1.5], "", None)
    assert row_of(output([5, 6])).logprobs is None


def test_lone_surrogates_are_kept_as_escapes() -> None:
    row = row_of(output([5], text="7\ud83d", rollout_infos={"stop_reason": "\ud83d"}))
    assert (row.text, row.stop_reason) == ("7\\ud83d", "\\ud83d")
    assert media_name("\udcff.png") == "\\udcff.png"


def test_all_turns_of_a_conversation_that_a_server_led() -> None:
    turns = {"response_token_ids": [[5, 6], [7, 8]], "rollout_logprobs": [[-1.0, -2.0], [-3.0, -4]]}
    row = row_of(output([8], **turns))
    assert (row.token_ids, row.logprobs) == ([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])
    # Tokens that the environment put in were not sampled, and have no log-probability.
    turns["rollout_logprobs"] = [[-1.0, -2.0], [-3.0]]
    assert row_of(output([8], **turns)).logprobs is None


@pytest.mark.parametrize(
    ("media", "name"),
    [
        ("图 1.png", "图 1.png"),
        ({"path": "a.png", "bytes": None}, "a.png"),
        ({"path": None, "bytes": b"png"}, "blake2b:"),
        (b"png", "blake2b:"),
        ("A" * 4096, "blake2b:"),
        (["1.png", "2.png"], "1.png 2.png"),
    ],
)
def test_media_go_by_their_names_never_by_their_content(media: Any, name: str) -> None:
    assert media_name(media).startswith(name)
    assert len(media_name(media)) < 64
    if name == "blake2b:":
        assert media_name(media) != media_name(b"other")


def test_equal_pixels_have_one_name() -> None:
    """However the images were made; a frame of another mode, size or pixel has another."""
    red, again, blue = (Image.new("RGB", (4, 2), color) for color in ("red", "red", "blue"))
    turned = Image.frombytes("RGB", (2, 4), red.tobytes())
    assert media_name(red) == media_name(again)
    large, other = np.zeros(10_000, np.uint8), np.zeros(10_000, np.uint8)
    assert media_name(large) == media_name(other)
    other[5_000] = 1  # which `repr` does not show
    different = [red, blue, turned, large, other, large.astype(np.int8)]
    assert len({media_name(each) for each in different}) == len(different)
