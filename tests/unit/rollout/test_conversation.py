"""The record of each turn, and how it travels from a server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.protocol import RolloutInferRequest

from swift_grpo_ext.media.pictures import media_name
from swift_grpo_ext.rollout.answers import to_rollout_output
from swift_grpo_ext.rollout.conversation import (
    Conversation,
    Turn,
    attach_turns,
    name_server,
    read_turns,
    write_turns,
)
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, WireError
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed

FIRST = SampleId(phase="train", step=3, number=1, group=2, index=0)
CROP = Image.effect_noise((40, 30), 60).convert("RGB")


POSITIONS = np.arange(6, dtype=np.int32).reshape(3, 2)
ANSWER = Answer(
    [
        Completion(
            text="七",
            token_ids=[5],
            logprobs=[-0.5],
            finish_reason="stop",
            stop_reason="!",
            seed=7,
            replica="rank 0",
        )
    ],
    Prompt([1, 2], POSITIONS),
)


def request(*words: str, images: Any = ()) -> RolloutInferRequest:
    roles = ("user", "assistant", "tool", "assistant", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, words, strict=False)]
    asked = RolloutInferRequest(messages=messages)
    asked.images = [*images]
    return asked


def note(conversation: Conversation, asked: RolloutInferRequest, answer: Answer = ANSWER) -> None:
    number = len(conversation.turns)
    [completion], prompt = answer
    turn = Turn(
        sample_id=replace(FIRST, turn=number),
        prompt=prompt,
        completion=completion,
        fingerprint=f"print {number}",
        engine_seconds=1.0,
        tool_seconds=2.0,
    )
    conversation.record(asked, turn)


def test_a_sample_has_what_its_conversations_end_says() -> None:
    """Seed and replica are the last answer's. A turn without room has none, and no stop."""
    note(conversation := Conversation(), request("?"))
    drawn = replace(ANSWER.completions[0], token_ids=[], stop_reason=None, seed=8)
    note(conversation, request("?", "3", "no"), Answer([drawn], Prompt([])))
    sample = RolloutSample(messages=[], rollout_infos={"num_turns": 2})
    attach_turns(sample, conversation.turns, is_conversation=True)
    assert [prompt.token_ids for prompt in sample.rollout_prompts] == [[1, 2]]
    own = {"seed": 7, "replica": "rank 0", "stop_reason": None}
    assert sample.rollout_infos == {"num_turns": 2, **own}


def test_each_turn_shows_what_was_added_for_it() -> None:
    conversation = Conversation()
    note(conversation, request("<image>?", images=["七.png"]))
    note(conversation, request("<image>?", "3", "<image>no", images=["七.png", CROP]))
    # ms-swift leaves an empty answer for a template to go on from.
    going_on = ("<image>?", "3", "<image>no", "4, but", "")
    note(conversation, request(*going_on, images=["七.png", CROP]))
    # A scheduler that starts over with fewer messages.
    note(conversation, request("<image>!", images=[CROP]))
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
    note(conversation, RolloutInferRequest(messages=[{"role": "user", "content": parts}]))
    [first] = conversation.turns
    assert first.messages == [{"role": "user", "content": "<image>?"}]
    assert first.media == [("七.png", None)]


def test_media_in_parts_of_a_later_message_are_media() -> None:
    """The record does not have their content as text."""
    conversation = Conversation()
    note(conversation, request("?"))
    later = request("?", "3", "")
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "image": CROP}]
    later.messages[2] = {"role": "user", "content": parts}
    note(conversation, later)
    assert conversation.turns[1].messages == [{"role": "user", "content": "Look: <image>"}]
    [crop] = conversation.turns[1].media
    assert crop.name == media_name(CROP)
    assert crop.webp is not None


def test_turns_come_from_a_server_as_they_were() -> None:
    conversation = Conversation()
    note(conversation, request("<image>?", images=["七.png"]))
    note(conversation, request("<image>?", "3", "<image>no", images=["七.png", CROP]))
    made = to_rollout_output(ANSWER)
    write_turns(made, conversation.turns)
    made.rollout_infos = json.loads(json.dumps(made.rollout_infos))  # as HTTP carries them
    name_server(made, "server 1 (http://a)")
    turns = read_turns(made, run_seed=42)
    assert made.rollout_infos == to_rollout_output(ANSWER).rollout_infos
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
    note(conversation := Conversation(), request("?"))
    write_turns(made := to_rollout_output(ANSWER), conversation.turns)
    made.rollout_infos["swift_grpo_ext.turns"] |= {"version": 1, "server": "server 1"}
    with pytest.raises(WireError, match="server 1 speaks version 1 of swift-grpo-ext's"):
        read_turns(made, run_seed=42)
