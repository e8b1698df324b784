"""What a rollout says of a sample against what training sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swift_grpo_ext.training.agreement import (
    DisagreementError,
    Gap,
    check_prompt,
    gap_limit,
    with_text_of,
)

NAN = float("nan")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_gaps_add_up_and_nan_is_the_largest_wherever_it_stands(order: tuple[int, ...]) -> None:
    gaps = [Gap(6.0, 2, 5.0), Gap(1.0, 1, 1.0), Gap(3.0, 1, 3.0)]
    whole = sum((gaps[n] for n in order), Gap())
    assert (whole, whole.mean, Gap().mean) == (Gap(10.0, 4, 5.0), 2.5, 0.0)
    gaps[0] = Gap(NAN, 1, NAN)
    whole = sum((gaps[n] for n in order), Gap())
    assert math.isnan(whole.mean)
    assert math.isnan(whole.largest)


@pytest.mark.parametrize(
    ("bits", "temperature", "limit"),
    [
        (32, 1.0, 0.01),
        (16, 1.0, 0.125),
        (8, 1.0, 0.125),
        (32, 0.25, 0.04),  # rounding errors of logits are divided by it too
        (32, 3.0, 0.01),  # above 1 the limit keeps its margin
        (32, 0.0, 0.01),
    ],
)
def test_limits(bits: int, temperature: float, limit: float) -> None:
    assert gap_limit(bits, temperature) == limit


# --- prompts ---

PAD, SOFT = 90, 91
WORDS = {10: "\n", 11: "\n\n", 12: "\n\n\n", 1: "a", 2: "b", 3: "ab"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS.get(i, f"<{i}>") for i in ids)


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
    check_prompt("sample 1", rollout, training, "", {PAD, SOFT}, decode)


@pytest.mark.parametrize(
    ("rollout", "training", "first"),
    [
        ([1, 2, 3], [9, 2, 3, 5], 0),
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
    message = rf"sample 1: .* a prompt of {len(rollout)} tokens .* from token {first} on.*Do this"
    with pytest.raises(DisagreementError, match=message):
        check_prompt("sample 1", rollout, training, "Do this.", {PAD, SOFT}, decode)


def test_a_message_spells_both_sides() -> None:
    message = r"on \(\[2\] against \[10, 2, 5, 5, 5\], 'b' against '\\nb<5><5><5>'\)"
    with pytest.raises(DisagreementError, match=message):
        check_prompt("sample 1", [1, PAD, 2], [1, PAD, 10, 2, 5, 5, 5, 5], "", {PAD}, decode)
    with pytest.raises(DisagreementError, match="against 'b'"):  # what stands for media has none
        check_prompt("sample 1", [1, 1], [1, -200, 2], "", {PAD}, decode)


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
        ([2, PAD, 3], [1, 1, 2, PAD, 3], [2, PAD, 3], True),
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


@pytest.mark.parametrize(
    ("rollout", "training", "was_cut"),
    [
        ([1, PAD, 2], [1, PAD, 2], True),
        ([1, 10, 2], [1, 2], False),  # no media: no template writes that
        ([1, PAD, 3], [1, PAD, 10, 1], False),  # words
        ([1, PAD, PAD], [1, PAD, 10], False),  # other pixel limits
        ([1, PAD, 2, PAD], [1, PAD, 10, 2], False),
        ([3, 4], [1, 2, 3, 4], False),  # no limit explains it
        ([1, 2], [1, 2, 3], True),  # cut on the right
        ([2, 4], [1, 2, 3, 4], True),  # in the middle
        ([3, PAD, 4], [1, PAD, PAD, 3, 4], True),  # a medium, or a part of one
        ([9, 4], [1, 2, 3, 4], True),
        ([PAD, SOFT, 4], [1, PAD, 2, SOFT, 4], True),  # side by side, they count as one
        ([0, 1, 2, 3], [1, 2, 3], True),  # the rollout saw more
    ],
)
def test_other_prompts_are_left_to_the_check(
    rollout: list[int], training: list[int], was_cut: bool
) -> None:
    assert with_text_of(rollout, encoded(training), {PAD, SOFT}, decode, was_cut=was_cut) == {}


@pytest.mark.parametrize(
    "more",
    [
        {"position_ids": [0, 1, 2, 3, 4, 5]},  # of a shorter text they are not known
        {"labels": None},
        {"input_ids": torch.tensor([1, PAD, 10, 2, 5, 6])},
    ],
)
def test_entries_whose_values_are_not_known_stay_as_they_are(more: dict[str, Any]) -> None:
    sample = encoded([1, PAD, 10, 2]) | more
    assert with_text_of([1, PAD, 2], sample, {PAD, SOFT}, decode) == {}
