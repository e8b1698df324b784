"""Training sees what the rollout saw and drew, sample by sample, or the run stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.training import batch as batch_module
from swift_grpo_ext.training.batch import (
    DisagreementError,
    check_batches,
    check_counts,
    check_prompts_of,
    check_training_batch,
    encode_as_training,
    encoding_for_training,
    kind_of_row,
    switch_off_dropout,
    with_text_of,
)
from tests.ranks import run_rank_groups
from tests.training.samples import arguments, batch, prompts, sample

PAD, SOFT = 90, 91
WORDS = {10: "\n", 11: "\n\n", 12: "\n\n\n", 1: "a", 2: "b", 3: "ab"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS.get(i, f"<{i}>") for i in ids)


def template(max_length: int | None = None) -> Any:
    return SimpleNamespace(
        max_length=max_length,
        truncation_strategy="left",
        placeholder_tokens=[PAD, SOFT],
        tokenizer=SimpleNamespace(decode=decode),
        data_collator=list,
    )


# --- counts (M6) ---


def test_each_sampled_token_has_a_log_probability() -> None:
    """Those that an environment put in between have none; a sample without any has no count."""
    tool = sample(turns=[(5, 6, 9), (7,)], logprobs=[(-1, -1), (-1,)], mask=[(1, 1, 0), (1,)])
    single = sample(response_token_ids=[5, 6], rollout_logprobs=[-1, -1])
    check_counts([sample(), sample(logprobs=()), tool, single])
    message = r"train round 3\.0, group 2, sample 1: 2 sampled tokens and 1 log-prob"
    with pytest.raises(DisagreementError, match=message):
        check_counts([sample(), sample(logprobs=[(-0.5,)])])
    with pytest.raises(DisagreementError, match="3 sampled tokens and 2 log-prob"):
        check_counts([sample(turns=[(5, 6, 9)])])


@pytest.mark.parametrize(("count", "is_good"), [(1, False), (2, True), (3, True), (4, False)])
def test_a_batch_without_log_probabilities_names_the_count(count: int, is_good: bool) -> None:
    """One token may lack in training: the end of a turn that was sampled."""
    drawn, without = sample(turns=[(5,) * count], logprobs=[(-1.0,) * count]), batch(rollout=None)
    check_training_batch([drawn], batch(), arguments(), template(), {})
    check_training_batch([sample(logprobs=())], without, arguments(), template(), {})
    if is_good:
        check_training_batch([drawn], without, arguments(), template(), {})
        return
    with pytest.raises(DisagreementError, match=f"{count} tokens were sampled, and 2 would be"):
        check_training_batch([drawn], without, arguments(), template(), {})


# --- prompts that differ (M3) ---


@pytest.mark.parametrize(
    ("rollout", "training"),
    [
        ([], [5]),
        ([1, 2], [1, 2, 5]),
        ([1, PAD, PAD, 2], [1, PAD, PAD, 2, 5]),
        ([1, 2, PAD], [1, 2, PAD, 5]),
        ([1, PAD, PAD, 2], [1, -200, 2, 5]),  # Phi-3-Vision, Ovis2.5
        ([PAD, PAD, 2, PAD, 2], [-1, 2, -2, 2, 5]),
        ([1, SOFT, SOFT, 2], [1, PAD, PAD, 2, 5]),  # frames of InternVL
    ],
)
def test_notation_is_no_difference(rollout: list[int], training: list[int]) -> None:
    drawn = sample(rollout_prompts=prompts(rollout), encoded={"input_ids": training})
    check_prompts_of(drawn, template(), {PAD, SOFT})


@pytest.mark.parametrize(
    ("rollout", "training", "first"),
    [
        ([1, 2, 3], [1, 2, 9, 5], 2),
        ([3, 4], [1, 2, 3, 4, 5], 0),  # it was cut
        ([1, 2], [1], 1),
        ([1, PAD, PAD, 2], [1, PAD, PAD, PAD, 2, 5], 3),  # other pixel limits
        ([1, SOFT, SOFT, 2], [1, PAD, PAD, PAD, 2, 5], 1),
        ([1, SOFT, PAD, 2], [1, PAD, PAD, 2, 5], 1),
        ([1, PAD, 2], [1, PAD, 10, 2, 5], 2),
        ([1, PAD, 2], [1, 2, 5], 1),
        ([1, 2], [1, PAD, 2, 5], 1),
        ([1, PAD, 2, PAD], [1, PAD, 2], 3),
        ([1, 2, PAD, 3], [1, PAD, 3, 5], 1),
    ],
)
def test_other_prompts_are_named(rollout: list[int], training: list[int], first: int) -> None:
    drawn = sample(rollout_prompts=prompts(rollout), encoded={"input_ids": training})
    message = rf"group 2, sample 1: .* of {len(rollout)} tokens .* from token {first} on.*Do this"
    with pytest.raises(DisagreementError, match=message):
        check_prompts_of(drawn, template(), {PAD, SOFT}, "Do this.")


def test_the_cause_is_named_or_warned_of_once(warnings: list[str]) -> None:
    encoded_ids = {"input_ids": [1, PAD, 10, 2, 5, 5, -200, 5]}
    other = sample(rollout_prompts=prompts([1, PAD, 2]), encoded=encoded_ids)
    message = r"sample 1: .* from token 2 on \(\[2\] against \[10, 2, 5, 5, -200\], 'b' against "
    message += r"'\\nb<5><5>'\)\. Give `swift rollout`.* --rollout_mismatch warn"
    with pytest.raises(DisagreementError, match=message):
        check_training_batch([sample(), other], batch(), arguments(), template(), {})
    warns = arguments(rollout_mismatch="warn")
    for _ in range(2):
        check_training_batch([sample(), other], batch(), warns, template(), {})
    [warning] = warnings
    assert "from token 2 on" in warning
    assert "Training goes on (--rollout_mismatch warn)" in warning


@pytest.mark.parametrize(
    ("rollout", "training", "first"),
    [
        ([1, 2, 3, 5, 7], [1, 2, 3, 5, 7, 6], None),
        ([1, PAD, 10, 2, 5, 7], [1, PAD, 2, 5, 7, 6], None),  # line breaks beside media
        ([1, PAD, 2, 5, PAD, 7], [1, PAD, 2, 5, 10, PAD, 10, 7, 6], None),
        ([1, 2, 3, 9, 7], [1, 2, 3, 5, 7, 6], 3),  # tokenized again, or thoughts dropped
        ([1, PAD, 2, 5, PAD, 7], [1, PAD, 2, 5, 7, 6], 4),  # an image that was not repeated
        ([3, 5, 7], [1, 2, 3, 5, 7, 6], 0),  # cut
    ],
)
@pytest.mark.parametrize("turn", [2, 3])
def test_each_turn_of_a_conversation(
    rollout: list[int], training: list[int], first: int | None, turn: int
) -> None:
    """Training has all that its engine saw; beside media, line breaks may differ in later turns."""
    others = [training[:1]] * 2
    of_turns = prompts(*others[: turn - 1], rollout, *others[turn - 1 :])
    talk = sample(rollout_prompts=of_turns, encoded={"input_ids": training})
    if first is None:
        check_prompts_of(talk, template(), {PAD, SOFT})
        return
    message = rf"sample 1 in turn {turn}: .* from token {first} on.*`rollout_infos\['images'\]`"
    with pytest.raises(DisagreementError, match=message):
        check_prompts_of(talk, template(), {PAD, SOFT}, "Do this.")


def test_unknown_prompts_are_left_to_others() -> None:
    unknown, never_drawn = sample(rollout_prompts=prompts(None)), sample(rollout_prompts=[])
    check_training_batch([unknown, never_drawn], batch(), arguments(), template(), {})
    with pytest.raises(DisagreementError):
        check_training_batch(
            [sample(rollout_prompts=prompts([9]))], batch(), arguments(), template(), {}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [(-0.5,)]}, "2 sampled tokens and 1 log-prob"),
        ({"rollout_prompts": prompts([9])}, "the rollout saw a prompt of 1 tokens"),
    ],
)
def test_what_one_rank_finds_ends_all(change: dict[str, Any], message: str) -> None:
    """They would wait for it in the next exchange, as long as `--ddp_timeout` says."""

    def work(ranks: RankGroup) -> str:
        drawn = [sample(), sample(**(change if ranks.rank == 1 else {}))]
        micro_batches = [([one], batch(), {}) for one in drawn]
        with pytest.raises(DisagreementError) as raised:
            check_batches(drawn, micro_batches, arguments(), template(), ranks)
        return str(raised.value)

    [first, second, third] = run_rank_groups(3, work)
    assert first == second == third
    assert message in first
    check_batches([sample()], [([sample()], batch(), {})], arguments(), template(), RankGroup())


# --- prompts that are made equal (M3) ---


def encoded(prompt: list[int]) -> dict[str, Any]:
    ids = [*prompt, 5, 6]
    kinds = [int(i < 0 or i in (PAD, SOFT)) for i in ids]
    return {
        "input_ids": ids,
        "labels": [*[-100] * len(prompt), 5, 6],
        "length": len(ids),
        "token_type_ids": kinds,
        "mm_token_type_ids": torch.tensor(kinds),
        "pixel_values": torch.zeros(len(ids), 4),
        "loss_scale": None,
    }


@pytest.mark.parametrize(
    ("rollout", "training", "expected", "was_cut"),
    [
        ([1, PAD, PAD, 2], [1, PAD, PAD, 10, 2], [1, PAD, PAD, 2], False),  # InternVL: a line more
        ([PAD, 11, 1, PAD, 2], [PAD, 1, PAD, 10, 2], [PAD, 11, 1, PAD, 2], False),
        ([1, SOFT, 2], [1, PAD, 10, 2], [1, PAD, 2], False),  # its frames
        ([1, 12, PAD, 2], [1, 10, 11, PAD, 2], [1, 12, PAD, 2], False),  # Gemma3
        ([1, PAD, PAD, 2, 11], [1, -200, 10, 2, 10], [1, -200, 2, 11], False),  # Ovis2.5
        ([3, 4], [1, 2, 3, 4], [3, 4], True),
        ([PAD, PAD, 3, 4], [1, PAD, PAD, 2, 3, 4], [PAD, PAD, 3, 4], True),
        ([PAD, PAD, 2, SOFT, 4], [1, PAD, PAD, 2, SOFT, 4], [PAD, PAD, 2, SOFT, 4], True),
        ([PAD, PAD, 4], [1, -200, 3, 4], [-200, 4], True),
        ([1, PAD, 2], [1, PAD, 10, 2], [1, PAD, 2], True),  # long, and not cut
    ],
)
def test_training_gets_the_text_of_the_rollout(
    rollout: list[int], training: list[int], expected: list[int], was_cut: bool
) -> None:
    whole = encoded(training)
    changed = with_text_of(rollout, whole, {PAD, SOFT}, decode, was_cut=was_cut)
    wanted = encoded(expected)
    assert torch.equal(changed.pop("mm_token_type_ids"), wanted.pop("mm_token_type_ids"))
    del wanted["pixel_values"], wanted["loss_scale"]
    assert changed == wanted


UNKNOWN = {"position_ids": [0, 1, 2, 3, 4, 5]}  # of a shorter text they are not known


@pytest.mark.parametrize(
    ("rollout", "training", "more", "was_cut"),
    [
        ([1, PAD, 2], [1, PAD, 2], {}, True),
        ([1, 10, 2], [1, 2], {}, False),  # no media: no template writes that
        ([1, PAD, 3], [1, PAD, 10, 1], {}, False),  # words
        ([1, PAD, PAD], [1, PAD, 10], {}, False),  # other pixel limits
        ([1, PAD, 2, PAD], [1, PAD, 10, 2], {}, False),
        ([3, 4], [1, 2, 3, 4], {}, False),  # no limit explains it
        ([1, 2], [1, 2, 3], {}, True),  # cut on the right
        ([2, 4], [1, 2, 3, 4], {}, True),  # in the middle
        ([3, PAD, 4], [1, PAD, PAD, 3, 4], {}, True),  # a medium, or a part of one
        ([PAD, SOFT, 4], [1, PAD, 2, SOFT, 4], {}, True),  # side by side, they count as one
        ([0, 1, 2, 3], [1, 2, 3], {}, True),  # the rollout saw more
        ([1, PAD, 2], [1, PAD, 10, 2], UNKNOWN, False),
        ([1, PAD, 2], [1, PAD, 10, 2], {"labels": None}, False),
        ([1, PAD, 2], [1, PAD, 10, 2], {"input_ids": torch.tensor([1, PAD, 10, 2, 5])}, False),
    ],
)
def test_what_cannot_be_made_equal_stays(
    rollout: list[int], training: list[int], more: dict[str, Any], was_cut: bool
) -> None:
    whole = encoded(training) | more
    assert with_text_of(rollout, whole, {PAD, SOFT}, decode, was_cut=was_cut) == {}


@pytest.mark.parametrize(
    ("max_length", "is_cut"), [(None, False), (0, False), (2, True), (3, True), (4, False)]
)
def test_what_is_collated_has_the_text_that_max_length_left(
    max_length: int | None, is_cut: bool
) -> None:
    """Where the limit explains it: a system prompt that one side lacks stays a difference. Each
    sample has its own; a conversation, and a sample without a rollout, keep theirs."""
    samples = [
        sample(rollout_prompts=prompts([3, 90, 4])),
        sample(rollout_prompts=prompts([1, 2, 3, 90, 4])),
        sample(rollout_prompts=prompts(None)),
        sample(rollout_prompts=prompts([3, 90, 4], [3, 90, 4, 5])),
    ]
    for one in samples:
        one.encoded = {"input_ids": [1, 2, 3, 90, 4, 5], "labels": [-100] * 5 + [5]}
    made = template(max_length)
    with encoding_for_training(made, samples):
        made.max_length = None  # as ms-swift, while it encodes
        collated = made.data_collator([one.encoded for one in samples])
    assert [len(encoded["input_ids"]) for encoded in collated] == [4 if is_cut else 6, 6, 6, 6]


def test_what_has_no_training_is_encoded_as_training_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a length, with the labels of sampled tokens alone, and with the rollout's text."""
    made, seen = template(3), list[tuple[Any, bool]]()

    def encode(one: Any, template: Any) -> dict[str, Any]:
        seen.append((template.max_length, hasattr(template, "_add_dynamic_eos")))
        return {"input_ids": [1, 2, 3, 90, 4, 5], "labels": [-100] * 5 + [5], "_extra_kwargs": {}}

    monkeypatch.setattr(batch_module, "encode_sample", encode)
    samples = [sample(rollout_prompts=prompts([3, 90, 4])) for _ in range(2)]
    encode_as_training(made, samples)
    assert [one.encoded for one in samples] == [
        {"input_ids": [3, 90, 4, 5], "labels": [-100] * 3 + [5]}
    ] * 2
    assert seen == [(None, True)] * 2
    assert (made.max_length, hasattr(made, "_add_dynamic_eos")) == (3, False)


def test_a_micro_batch_looks_at_its_own_samples() -> None:
    """Not at all of a round: that took 10 s at 10,240 samples. A teacher's come in between."""
    looks = 0

    class Looked(SimpleNamespace):
        @property
        def encoded(self) -> Any:
            nonlocal looks
            looks += 1
            return self.own

    samples: list[Any] = []
    for _ in range(64):
        own = {"input_ids": [1, 2, 3, 90, 4, 5], "labels": [-100] * 5 + [5]}
        samples.append(
            Looked(own=own, response_token_ids=[[5]], rollout_prompts=prompts([3, 90, 4]))
        )
    made = template(3)
    with encoding_for_training(made, samples):
        for one in samples:
            [changed, teacher] = made.data_collator([one.own, {"input_ids": [7]}])
            assert (changed["input_ids"], teacher["input_ids"]) == ([3, 90, 4, 5], [7])
    assert looks <= 3 * len(samples)


# --- positions (M3) ---

ROLLOUT = np.array([[0, 1, 1, 2, 9], [0, 1, 2, 3, 9], [0, 1, 1, 1, 9]], dtype=np.int32)


def placed(*rows: Any, padding: int = 0) -> torch.Tensor:
    """Positions [3, batch, tokens] of samples with two tokens behind their prompt's."""
    made = []
    for row in rows:
        behind = int(row.max()) + torch.arange(1, 3).expand(3, 2)
        made.append(torch.cat([torch.as_tensor(row), behind, torch.zeros(3, padding)], 1).long())
    return torch.stack(made, 1)


@pytest.mark.parametrize("how", ["right", "left", "packed", "counted by the model"])
def test_positions_are_compared(how: str, warnings: list[str]) -> None:
    """However samples are laid in a row, those of the prompt count alone."""
    other = np.array(ROLLOUT)
    other[:, 4] = 4
    ids = [1, PAD, PAD, PAD, 2, 5, 6]
    rows = {"encoded": {"input_ids": ids}, "videos": ["a"]}
    positions = (None, ROLLOUT, None)
    samples = [sample(**rows, rollout_prompts=prompts(ids[:5], positions=p)) for p in positions]

    def check(positions: torch.Tensor, **changes: Any) -> None:
        inputs: dict[str, Any] = {"position_ids": positions}
        mask = torch.zeros(positions.shape[1:])
        if how == "right":
            mask[:, :7] = 1
        elif how == "left":
            mask[:, -7:] = 1
            inputs["position_ids"] = positions.roll(positions.shape[2] - 7, 2)
        if how in ("right", "left"):
            inputs["attention_mask"] = mask
        elif how == "packed":
            inputs["position_ids"] = positions[:, :, :7].flatten(1)[:, None]
        else:
            del inputs["position_ids"]
        check_training_batch(samples, batch(), arguments(**changes), template(), inputs)

    check(placed(other, ROLLOUT, other, padding=3))
    if how == "counted by the model":
        check(placed(ROLLOUT, other, ROLLOUT, padding=3))
        return
    message = r"sample 1, a row of video: .* from token 4 of 5 on \(\[9, 9, 9\] against \[4, 4, 4\]"
    with pytest.raises(DisagreementError, match=message):
        check(placed(ROLLOUT, other, ROLLOUT, padding=3))
    check(placed(ROLLOUT, other, ROLLOUT, padding=3), rollout_mismatch="warn")
    assert "otherwise, from token 4" in warnings[-1]


ASKED = {"type": "text", "text": "What is it?"}
SEEN = {"type": "image_url", "image_url": {"url": "1.png"}}
HEARD = {"type": "audio", "audio": "1.wav"}
TAGGED = f"<img>{__file__}</img>"
"""ms-swift looks for the file."""


@pytest.mark.parametrize(
    ("media", "kind"),
    [
        ({}, "text"),
        ({"images": None, "videos": []}, "text"),
        ({"images": ["a"]}, "image"),
        ({"images": ["a", "b"], "audios": ["c"]}, "images+audio"),
        ({"videos": ["a", "b"], "images": ["c"]}, "image+videos"),
        ({"images": "a"}, "image"),  # one, as it is
        ({"images": [], "messages": [{"role": "user", "content": [SEEN, ASKED]}]}, "image"),
        ({"messages": [{"role": "user", "content": [SEEN, HEARD, SEEN]}]}, "images+audio"),
        (
            {
                "messages": [
                    {"role": "user", "content": [ASKED, SEEN]},
                    {"role": "assistant", "content": "a cat"},
                    {"role": "user", "content": [{"type": "video", "video": ["1.png", "2.png"]}]},
                ]
            },
            "image+video",
        ),
        (
            {"messages": [{"role": "user", "content": f"{TAGGED} or {TAGGED}?"}]},
            "images",
        ),
        # Parts without a value stand for the column's; a text of tags is a text.
        (
            {
                "images": ["a"],
                "messages": [{"role": "user", "content": [{"type": "image"}, ASKED]}],
            },
            "image",
        ),
        ({"messages": [{"role": "user", "content": "Is <video> a tag?"}]}, "text"),
        ({"messages": [{"role": "assistant", "content": [5, 6]}], "audios": ["a"]}, "audio"),
    ],
)
def test_kinds_of_rows(media: dict[str, Any], kind: str) -> None:
    assert kind_of_row(sample(**media)) == kind


# --- dropout ---


class Attention(torch.nn.Module):
    """Calls functional dropout with its attribute, as transformers' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.5
        self.dropout = torch.nn.Dropout(0.5)
        self.scaling = 0.5
        self.hidden_dropout = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(x, self.attention_dropout, self.training)
        return torch.Tensor(self.dropout(dropped))


def test_dropout_is_really_off() -> None:
    """In training mode two passes agree, where they did not; what was 0 is not counted."""
    layers = torch.nn.Sequential(Attention(), torch.nn.Dropout2d(0.1), torch.nn.Dropout(0.0))
    layers.train()
    x = torch.ones(4, 64)
    assert not torch.equal(layers[0](x), layers[0](x))
    assert switch_off_dropout(layers) == 3
    assert torch.equal(layers(x), x)
    assert layers[0].scaling == 0.5
    assert switch_off_dropout(layers) == 0
