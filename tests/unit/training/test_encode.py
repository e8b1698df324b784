"""Each prompt is encoded once, and is the one that the rollout saw, or the run stops (M3)."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training import encode as encode_module
from swift_grpo_ext.training.encode import (
    GroupEncoder,
    check_rollout_prompts,
    encode_whole,
    with_text_of,
)
from swift_grpo_ext.training.group import DisagreementError, flatten
from tests.unit.training.samples import arguments, prompts, sample

PAD, SOFT = 90, 91
PLACEHOLDERS = {PAD, SOFT}
WORDS = {10: "\n", 11: "\n\n", 12: "\n\n\n", 1: "a", 2: "b", 3: "ab"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS.get(i, f"<{i}>") for i in ids)


PIXELS = torch.arange(8.0).reshape(2, 4)


def encoded(prompt: list[int], own: Any = (5, 6), mask: Any = (1, 1)) -> dict[str, Any]:
    """Return an encoded row with the response `own`, of which `mask` is trained on."""
    ids = [*prompt, *own]
    kinds = [int(i < 0 or i in PLACEHOLDERS) for i in ids]
    trained = [i if kept else -100 for i, kept in zip(own, mask, strict=True)]
    return {
        "input_ids": ids,
        "labels": [*[-100] * len(prompt), *trained],
        "length": len(ids),
        "loss_scale": [0.0] * len(prompt) + [float(kept) for kept in mask],
        "token_type_ids": kinds,
        "mm_token_type_ids": torch.tensor(kinds),
        "pixel_values": PIXELS,
    }


class Template(SimpleNamespace):
    """Encodes a prompt of two placeholders and the sample's words, and counts its calls. ms-swift's
    method `_add_dynamic_eos` would label ends of turns that were not sampled."""

    tokenizer = SimpleNamespace(decode=decode)
    placeholder_tokens: ClassVar[list[int]] = [PAD, SOFT]
    max_length: int | None = None
    truncation_strategy = "left"
    head, tail = (1, PAD, PAD), ()
    num_encoded = 0

    def encode(self, one: Any) -> dict[str, Any]:
        assert hasattr(self, "_add_dynamic_eos") == bool(one.response_token_ids)
        self.num_encoded += 1
        own = [*flatten(one.response_token_ids)]
        mask = [*flatten(one.response_loss_mask)] or [1] * len(own)
        row = encoded([*self.head, *one.words], [*own, *self.tail], [*mask, *[0] * len(self.tail)])
        return row | {"_extra_kwargs": {}}


def group_of(*answers: Any, **fields: Any) -> list[Any]:
    """Return samples of one group, each with its turns and its mask."""
    made = []
    for index, (turns, mask) in enumerate(answers):
        name = SampleId(phase="train", step=3, number=0, group=2, index=index)
        common = {"words": [3, 4], "prompt_hash": "h", "sample_id": name}
        common["rollout_prompts"] = prompts([1, PAD, PAD, 3, 4])
        made.append(sample(turns=turns, mask=mask, **(common | fields)))
    return made


@pytest.fixture(autouse=True)
def _encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "encode_sample", lambda one, made: made.encode(one))


def encoder_of(
    max_length: int | None = None, *, is_conversation: bool = False, **settings: Any
) -> tuple[GroupEncoder, Any]:
    made: Any = Template(max_length=max_length)
    encoder = GroupEncoder(made, arguments(**settings), is_conversation=is_conversation)
    made.max_length = None  # as ms-swift, while it encodes
    return encoder, made


ANSWERS = [([(5, 6)], ()), ([(7,)], [(1,)]), ([(8, 9, 6)], [(1, 0, 1)]), ([(6,)], ())]


def test_a_group_is_encoded_once() -> None:
    """Each sample equals a whole encode, and has its own containers."""
    encoder, made = encoder_of()
    samples = group_of(*ANSWERS)
    found = [encoder.encode(one) for one in samples]
    assert made.num_encoded == 1
    for one, row in zip(samples, found, strict=True):
        whole = encode_whole(one, made, None)
        assert row.keys() == whole.keys()
        assert torch.equal(row["mm_token_type_ids"], whole.pop("mm_token_type_ids"))
        assert row["pixel_values"] is whole.pop("pixel_values") is PIXELS
        assert {name: row[name] for name in whole} == whole
    assert len({id(row.prompt) for row in found}) == 1
    found[0]["input_ids"].clear()  # as collators do
    found[0].pop("pixel_values")
    assert encoder.encode(samples[1])["input_ids"][-1] == 7
    assert encoder.fault == ""
    assert not hasattr(made, "_add_dynamic_eos")


TURNS = {"response_token_ids": [[5], [6]], "response_loss_mask": []}


def test_what_is_encoded_whole() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 2),
        ({"rollout_prompts": []}, 2),  # an unknown prompt
        ({**TURNS, "response_token_ids": []}, 4),  # from a scheduler that returns none
        (TURNS, 4),
        ({**TURNS, "response_token_ids": [[5, PAD]]}, 4),
        ({"prompt_hash": "other"}, 3),  # rows that differ (G3), each encoded once
        ({"rollout_prompts": prompts([1, PAD, PAD, 3, 4, 4])}, 4),
    ]
    for changes, number in cases:
        encoder, made = encoder_of(rollout_mismatch="warn")
        first, *others, of_other_group = group_of(*ANSWERS[:2], ANSWERS[1], ANSWERS[0])
        of_other_group.sample_id = replace(of_other_group.sample_id, group=3, index=0)
        for one in others:
            vars(one).update(changes)
        for one in (first, *others, of_other_group):
            encoder.encode(one)
        assert made.num_encoded == number


def test_rows_that_do_not_end_with_their_response() -> None:
    encoder, made = encoder_of()
    made.tail = (99,)
    assert [encoder.encode(one).prompt for one in group_of(*ANSWERS[:2])] == [None, None]


def test_conversations_share_a_prompt_of_text() -> None:
    """Each is encoded whole. With equal token ids, media may still differ, so only text is
    shared."""
    encoder, made = encoder_of(is_conversation=True)
    talks = group_of(*ANSWERS[:2])
    assert [encoder.encode(one).prompt for one in talks] == [None, None]
    assert made.num_encoded == 2
    made.head = (1,)
    for one in talks:
        one.words, one.prompt_hash, one.rollout_prompts = [2], "text", prompts([1, 2])
    first, second = (encoder.encode(one).prompt for one in talks)
    assert first is second is not None
    assert first.num_tokens == 2
    talks[1].words = [3]
    assert encoder.encode(talks[1]).prompt is None


def test_samples_have_the_text_that_max_length_left() -> None:
    """Only if the limit explains a difference: a system prompt of one side is still named."""
    samples = group_of(*ANSWERS[:2], rollout_prompts=prompts([1, PAD, PAD, 4]))
    for max_length, words in ((None, [3, 4]), (0, [3, 4]), (3, [4]), (4, [4]), (6, [3, 4])):
        encoder, _ = encoder_of(max_length)
        found = [encoder.encode(one)["input_ids"] for one in samples]
        assert found == [[1, PAD, PAD, *words, 5, 6], [1, PAD, PAD, *words, 7]]
        assert ("the rollout saw a prompt of 4 tokens" in encoder.fault) == (words == [3, 4])


def test_a_prompt_that_differs_is_named_or_warned_of_once(warnings: list[str]) -> None:
    stops, _ = encoder_of()
    warns, _ = encoder_of(rollout_mismatch="warn")
    for one in group_of(*ANSWERS[:2], rollout_prompts=prompts([1, PAD, PAD, 2])):
        stops.encode(one)
        warns.encode(one)
    message = r"group 2, sample 0: .* from token 3 on \(\[2\] against \[3, 4, 5, 6\], 'b' against "
    message += r"'ab<4><5><6>'\)\. Give `swift rollout`.* --rollout_mismatch warn"
    assert re.search(message, stops.fault)
    assert warns.fault == ""
    [warning] = warnings
    assert "from token 3 on" in warning
    assert "Training goes on (--rollout_mismatch warn)" in warning


def test_prompts_that_differ_are_named() -> None:
    """Another notation of the same medium is no difference. In the turns of a conversation, line
    breaks beside media are none."""
    for rollout, training, first, later in (
        ([1, PAD, PAD, 2], [1, PAD, PAD, 2, 5], None, None),
        ([PAD, PAD, 2, PAD, 2], [-1, 2, -2, 2, 5], None, None),  # Phi-3-Vision, Ovis2.5
        ([1, SOFT, SOFT, 2], [1, PAD, PAD, 2, 5], None, None),  # frames of InternVL
        ([1, 2, 3], [1, 2, 9, 5], 2, 2),
        ([1, 2], [1], 1, 1),
        ([1, PAD, PAD, 2], [1, PAD, PAD, PAD, 2, 5], 3, 3),  # other pixel limits
        ([1, SOFT, PAD, 2], [1, PAD, PAD, 2, 5], 1, 1),
        ([1, PAD, 2, PAD], [1, PAD, 2], 3, 3),
        # line breaks beside media
        ([1, PAD, 10, 2, 5, 7], [1, PAD, 2, 5, 7, 6], 2, None),
        ([1, PAD, 2, 5, PAD, 7], [1, PAD, 2, 5, 10, PAD, 10, 7, 6], 4, None),
    ):
        for turn, position in ((1, first), (2, later), (3, later)):
            of_turns = [training[:1]] * 2 if turn > 1 else []
            of_turns.insert(turn - 1, rollout)
            drawn = sample(rollout_prompts=prompts(*of_turns), encoded={"input_ids": training})
            where = rf" in turn {turn}: .*`rollout_infos\['images'\]`" if turn > 1 else ": .* Give"
            named = rf".* of {len(rollout)} tokens .* from token {position} on.*"
            message = f"group 2, sample 1{where.replace('.*', named)}"
            differs = pytest.raises(DisagreementError, match=message)
            with nullcontext() if position is None else differs:
                check_rollout_prompts(drawn, drawn.encoded, Template(), PLACEHOLDERS)


def test_training_gets_the_text_of_the_rollout() -> None:
    cases: list[tuple[Any, ...]] = [
        ([1, PAD, PAD, 2], [1, PAD, PAD, 10, 2], [1, PAD, PAD, 2], False),  # InternVL: a line more
        ([1, SOFT, 2], [1, PAD, 10, 2], [1, PAD, 2], False),  # its frames
        ([1, PAD, PAD, 2, 11], [1, -200, 10, 2, 10], [1, -200, 2, 11], False),  # Ovis2.5
        ([PAD, PAD, 4], [1, -200, 3, 4], [-200, 4], True),
        ([1, PAD, 2], [1, PAD, 10, 2], [1, PAD, 2], True),  # long, and not cut
        # What cannot be made equal stays
        ([1, 10, 2], [1, 2], None, False),  # no media: no template writes that
        ([1, PAD, 3], [1, PAD, 10, 1], None, False),  # words
        ([3, 4], [1, 2, 3, 4], None, False),  # no limit explains it
        ([2, 4], [1, 2, 3, 4], None, True),  # in the middle
        ([3, PAD, 4], [1, PAD, PAD, 3, 4], None, True),  # a medium, or a part of one
        ([0, 1, 2, 3], [1, 2, 3], None, True),  # the rollout saw more
    ]
    for rollout, training, expected, was_cut in cases:
        changed = with_text_of(rollout, encoded(training), PLACEHOLDERS, decode, was_cut=was_cut)
        wanted = encoded(expected) if expected else {}
        types = changed.pop("mm_token_type_ids", []), wanted.pop("mm_token_type_ids", [])
        assert [*types[0]] == [*types[1]]
        wanted.pop("pixel_values", None)
        assert changed == wanted
    for entry in (
        {"position_ids": [0, 1, 2, 3, 4, 5]},  # not known for a shorter text
        {"labels": None},
        {"input_ids": torch.tensor([1, PAD, 10, 2, 5])},
    ):
        whole = encoded([1, PAD, 10, 2]) | entry
        assert with_text_of([1, PAD, 2], whole, PLACEHOLDERS, decode, was_cut=False) == {}
