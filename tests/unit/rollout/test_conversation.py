"""Samples have every column of the data set, and the turns of their conversations (R1, V1)."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rl_core.data import GRPOSample

from swift_grpo_ext.media.pictures import Picture, picture_of
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
from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

FIRST = SampleId(phase="train", step=3, number=1, group=2, index=0)
CROP = Image.effect_noise((40, 30), 60).convert("RGB")
COMPLETION = Completion(
    text="七",
    token_ids=[5],
    logprobs=[-0.5],
    finish_reason="stop",
    stop_reason="!",
    seed=7,
    replica="rank 0",
)
PROMPT = Prompt([1, 2], np.arange(6, dtype=np.int32).reshape(3, 2))
SEVEN, PICTURE = Picture("七.png"), picture_of(CROP)


def note(
    conversation: Conversation,
    *contents: Any,
    images: Any = (),
    completion: Completion = COMPLETION,
) -> None:
    """Record a turn that is asked with these messages."""
    roles = ("user", "assistant", "user", "assistant", "assistant")
    pairs = zip(roles, contents, strict=False)
    asked = RolloutInferRequest(messages=[{"role": role, "content": c} for role, c in pairs])
    asked.images = [*images]
    number = len(conversation.turns)
    turn = Turn(replace(FIRST, turn=number), PROMPT, completion, f"print {number}")
    conversation.record(asked, replace(turn, engine_seconds=1.0, tool_seconds=2.0))


def shown(conversation: Conversation) -> list[tuple[list[Any], list[Picture]]]:
    """Return the contents and the media that each turn added."""
    return [([m["content"] for m in turn.messages], turn.media) for turn in conversation.turns]


def test_each_turn_shows_what_was_added_for_it() -> None:
    conversation = Conversation()
    note(conversation, "<image>?", images=["七.png"])
    note(conversation, "<image>?", "3", "<image>no", images=["七.png", CROP])
    # ms-swift leaves an empty answer for a template to go on from.
    note(conversation, "<image>?", "3", "<image>no", "4, but", "", images=["七.png", CROP])
    # A scheduler that starts over with fewer messages.
    note(conversation, "<image>!", images=[CROP])
    assert shown(conversation) == [
        (["<image>?"], [SEVEN]),
        (["<image>no"], [PICTURE]),
        ([], []),
        (["<image>!"], [PICTURE]),
    ]
    assert PICTURE.webp is not None
    # Media in parts are media: the record does not have their content as text.
    note(in_parts := Conversation(), first := [{"type": "image", "image": "七.png"}])
    later = [{"type": "text", "text": "Look: "}, {"type": "image", "image": CROP}]
    note(in_parts, first, "3", later)
    assert shown(in_parts) == [(["<image>"], [SEVEN]), (["Look: <image>"], [PICTURE])]


def test_a_sample_has_what_its_conversations_end_says() -> None:
    """Seed and replica are the last answer's. A turn without room has none, and no stop."""
    note(conversation := Conversation(), "?")
    no_room = replace(COMPLETION, token_ids=[], stop_reason=None, seed=8)
    note(conversation, "?", "3", "no", completion=no_room)
    for is_conversation, infos in (
        (True, {"num_turns": 2, "seed": 7, "replica": "rank 0", "stop_reason": None}),
        (False, {"num_turns": 2}),
    ):
        sample = RolloutSample(messages=[], rollout_infos={"num_turns": 2})
        attach_turns(sample, conversation.turns, is_conversation=is_conversation)
        assert [prompt.token_ids for prompt in sample.rollout_prompts] == [[1, 2]]
        assert sample.rollout_infos == infos


def test_turns_come_from_a_server_as_they_were() -> None:
    """Turns of another version are refused."""
    conversation = Conversation()
    note(conversation, "<image>?", images=["七.png"])
    note(conversation, "<image>?", "3", "<image>no", images=["七.png", CROP])
    output = to_rollout_output(Answer([COMPLETION], PROMPT))
    plain = dict(output.rollout_infos)
    message = conversation.turns[1].messages[0]
    message["found"] = {7}  # a scheduler may put any object into a message
    write_turns(output, conversation.turns)
    message["found"] = "{7}"
    output.rollout_infos = json.loads(json.dumps(output.rollout_infos))  # as HTTP carries them
    name_server(output, "server 1 (http://a)")
    other = deepcopy(output)
    for came, was in zip(read_turns(output, run_seed=42), conversation.turns, strict=True):
        assert list(came.completion.token_ids) == [5]
        assert came.completion.seed == sample_seed(42, was.sample_id)
        assert came.completion.replica == "server 1 (http://a) rank 0"
        assert came.prompt.token_ids == PROMPT.token_ids
        assert np.array_equal(came.prompt.positions, PROMPT.positions)
        assert replace(came, completion=COMPLETION, prompt=PROMPT) == was
    assert output.rollout_infos == plain
    assert read_turns(output, run_seed=42) == []  # a server without us
    other.rollout_infos["swift_grpo_ext.turns"]["version"] = 1
    with pytest.raises(WireError, match=r"server 1 .* speaks version 1 of swift-grpo-ext's"):
        read_turns(other, run_seed=42)


ROW = {
    "messages": [{"role": "user", "content": "Which digit?"}],
    **{"sample_id": 12, "prompt_hash": "a", "rollout_prompts": ["b"]},
}


def test_columns_stay_columns_whatever_they_are_called() -> None:
    [sample] = RolloutGRPOTrainer.to_samples(RolloutGRPOTrainer, [ROW])
    assert type(sample) is RolloutSample
    assert sample.to_reward_row() == GRPOSample.from_row(ROW).to_reward_row()
    assert not hasattr(sample, "sample_id")
    assert not sample.rollout_prompts
    sample.sample_id = FIRST
    assert vars(deepcopy(sample)) == vars(sample)
