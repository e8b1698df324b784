"""What is noted of each turn, and how it comes from a server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.protocol import (
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)

from swift_grpo_ext.media.pictures import media_name
from swift_grpo_ext.rollout.conversation import (
    Conversation,
    Turn,
    name_server,
    read_turns,
    turn_of,
    write_turns,
)
from swift_grpo_ext.rollout.generate import PromptResponse
from swift_grpo_ext.rollout.wire import WireError
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.stops.templates import StoppedChoice, record_stop_reason

FIRST = SampleId(phase="train", step=3, number=1, group=2, index=0)
CROP = Image.effect_noise((40, 30), 60).convert("RGB")


def output(*token_ids: int, logprobs: Any = None, **infos: Any) -> RolloutOutput:
    message = ChatMessage(role="assistant", content="七")
    choice = StoppedChoice(0, message, "stop", logprobs, token_ids=[*token_ids], stop_reason="!")
    positions = np.arange(6, dtype=np.int32).reshape(3, 2)
    response = PromptResponse(
        "", [choice], UsageInfo(1, 1, 2), prompt_token_ids=[1, 2], prompt_positions=positions
    )
    return record_stop_reason(RolloutOutput(response=response, rollout_infos=infos))


def request(*words: str, images: Any = ()) -> RolloutInferRequest:
    roles = ("user", "assistant", "tool", "assistant", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, words, strict=False)]
    asked = RolloutInferRequest(messages=messages)
    asked.images = [*images]
    return asked


def turn(number: int = 0, **fields: Any) -> Turn:
    made = turn_of(output(5, replica="rank 0"), replace(FIRST, turn=number), f"print {number}")
    return replace(made, **fields)


def test_a_turn_holds_what_the_engine_saw_and_gave() -> None:
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}
    made = turn_of(
        output(5, 6, logprobs=logprobs, seed=7, replica="rank 0"), FIRST, "print", tool_seconds=2.0
    )
    assert made.prompt.token_ids == [1, 2]
    assert made.prompt.positions is not None
    completion = made.completion
    assert (completion.text, completion.token_ids, completion.logprobs) == (
        "七",
        [5, 6],
        [-0.5, -1.5],
    )
    assert (completion.seed, completion.replica) == (7, "rank 0")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "!")
    assert (made.engine_seconds, made.tool_seconds) == (0.0, 2.0)


def test_each_turn_shows_what_was_added_for_it() -> None:
    conversation = Conversation()
    conversation.note(request("<image>?", images=["七.png"]), turn(0))
    conversation.note(request("<image>?", "3", "<image>no", images=["七.png", CROP]), turn(1))
    # ms-swift leaves an empty answer for a template to go on from.
    going_on = ("<image>?", "3", "<image>no", "4, but", "")
    conversation.note(request(*going_on, images=["七.png", CROP]), turn(2))
    # A scheduler that began anew, with fewer.
    conversation.note(request("<image>!", images=[CROP]), turn(3))
    first, second, third, fourth = conversation.turns
    assert first.messages == [{"role": "user", "content": "<image>?"}]
    assert first.media == [("七.png", None)]
    assert second.messages == [{"role": "tool", "content": "<image>no"}]
    [crop] = second.media
    assert crop.name == media_name(CROP)
    assert crop.webp is not None
    assert (third.messages, third.media) == ([], [])
    assert fourth.messages == [{"role": "user", "content": "<image>!"}]
    assert [picture.name for picture in fourth.media] == [crop.name]


def test_a_first_prompt_has_marks_for_media_in_parts() -> None:
    conversation = Conversation()
    parts = [{"type": "image", "image": "七.png"}, {"type": "text", "text": "?"}]
    conversation.note(RolloutInferRequest(messages=[{"role": "user", "content": parts}]), turn())
    [first] = conversation.turns
    assert first.messages == [{"role": "user", "content": "<image>?"}]
    assert first.media == [("七.png", None)]


def test_media_in_parts_of_a_later_message_are_media() -> None:
    """Their content is not written down as text."""
    conversation = Conversation()
    conversation.note(request("?"), turn(0))
    later = request("?", "3", "")
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "image": CROP}]
    later.messages[2] = {"role": "user", "content": parts}
    conversation.note(later, turn(1))
    assert conversation.turns[1].messages == [{"role": "user", "content": "Look: <image>"}]
    [crop] = conversation.turns[1].media
    assert crop.name == media_name(CROP)
    assert crop.webp is not None


def test_turns_come_from_a_server_as_they_were() -> None:
    conversation = Conversation()
    conversation.note(request("<image>?", images=["七.png"]), turn(0))
    conversation.note(request("<image>?", "3", "<image>no", images=["七.png", CROP]), turn(1))
    made = output(5)
    write_turns(made, conversation.turns)
    made.rollout_infos = json.loads(json.dumps(made.rollout_infos))  # as HTTP carries them
    name_server(made, "server 1 (http://a)")
    turns = read_turns(made, run_seed=42)
    assert made.rollout_infos == {"stop_reason": "!"}
    for came, was in zip(turns, conversation.turns, strict=True):
        completion = was.completion
        assert list(came.completion.token_ids) == completion.token_ids
        assert came.completion.seed == sample_seed(42, was.sample_id)
        assert came.completion.replica == "server 1 (http://a) rank 0"
        assert came.prompt.token_ids == was.prompt.token_ids
        assert came.prompt.positions is not None
        kept = ("sample_id", "fingerprint", "messages", "media", "engine_seconds", "tool_seconds")
        assert [getattr(came, name) for name in kept] == [getattr(was, name) for name in kept]
    assert read_turns(made, run_seed=42) == []  # a server without us


def test_turns_of_another_version_are_refused() -> None:
    made = output(5)
    write_turns(made, [turn()])
    made.rollout_infos["swift_grpo_ext.turns"] |= {"version": 1, "server": "server 1"}
    with pytest.raises(WireError, match="server 1 speaks version 1 of swift-grpo-ext's"):
        read_turns(made, run_seed=42)
