"""Prompts of rollout and training, in whatever notation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_grpo_ext.training.agreement import (
    DisagreementError,
    check_prompt,
    with_cut_prompt,
    with_text_of,
)

IDS = st.lists(st.integers(0, 5), max_size=8)

PAD, SOFT = 90, 91
WORDS = {10: "\n", 11: "\n\n", 12: "\n\n\n", 1: "a", 2: "b", 3: "ab"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS.get(i, f"<{i}>") for i in ids)


def differ(rollout: list[int], training: list[int]) -> bool:
    try:
        check_prompt("sample 1", rollout, training, "", {PAD, SOFT}, decode)
    except DisagreementError:
        return True
    return False


@given(prompt=IDS, completion=IDS, change=st.integers(0, 7))
def test_a_prompt_that_differs_anywhere_is_named(
    prompt: list[int], completion: list[int], change: int
) -> None:
    check_prompt("sample 1", prompt, prompt + completion, "Do this.")
    if change < len(prompt):
        other = [*prompt[:change], 9, *prompt[change + 1 :]]
        message = rf"sample 1: .* from token {change} on.*Do this"
        with pytest.raises(DisagreementError, match=message):
            check_prompt("sample 1", other, prompt + completion, "Do this.")


def test_a_prompt_that_was_cut() -> None:
    message = r"a prompt of 2 tokens .* from token 0 on \(\[3, 4\] against \[1, 2, 3, 4, 5\], "
    with pytest.raises(DisagreementError, match=message):
        check_prompt("sample 1", [3, 4], [1, 2, 3, 4, 5, 6], "")


@pytest.mark.parametrize(
    ("rollout", "training"),
    [
        ([1, PAD, PAD, 2], [1, PAD, PAD, 2, 5]),
        ([1, PAD, PAD, 2], [1, -200, 2, 5]),  # Phi-3-Vision, Ovis2.5
        ([PAD, PAD, 2, PAD, 2], [-1, 2, -2, 2, 5]),
        ([1, SOFT, SOFT, 2], [1, PAD, PAD, 2, 5]),  # frames of InternVL
        ([1, 12, PAD, SOFT, 2], [1, 10, 11, PAD, SOFT, 2, 5]),  # Gemma3: whitespace is merged
        ([1, PAD, 12, 2], [1, PAD, 11, 10, 2, 5]),
        ([1, PAD, 12], [1, PAD, 11, 10, 5]),
        ([1, PAD, 10, 11], [1, PAD, 12]),
    ],
)
def test_notation_is_no_difference(rollout: list[int], training: list[int]) -> None:
    assert not differ(rollout, training)


@pytest.mark.parametrize(
    ("rollout", "training"),
    [
        ([1, PAD, PAD, 2], [1, PAD, PAD, PAD, 2, 5]),  # other pixel limits
        ([1, SOFT, SOFT, 2], [1, PAD, PAD, PAD, 2, 5]),
        ([1, SOFT, PAD, 2], [1, PAD, PAD, 2, 5]),
        ([1, PAD, 2], [1, PAD, 10, 2, 5]),  # InternVL: a line more
        ([1, PAD, 10, 2], [1, PAD, 2, 5]),
        ([1, PAD, 2], [1, 2, 5]),
        ([1, 2], [1, PAD, 2, 5]),
        ([1, PAD, 2, PAD], [1, PAD, 2]),
        ([3, PAD], [1, 2, PAD, 5]),  # words that other tokens spell
        ([1, PAD, 3], [1, PAD, 1, 2, 5]),
        ([1, PAD, 11], [1, PAD, 10]),
    ],
)
def test_other_prompts_differ(rollout: list[int], training: list[int]) -> None:
    assert differ(rollout, training)


def test_a_message_spells_both_sides() -> None:
    message = r"from token 2 on \(\[2\] against \[10, 2, 5\], 'b' against '\\nb<5>'\)"
    with pytest.raises(DisagreementError, match=message):
        check_prompt("sample 1", [1, PAD, 2], [1, PAD, 10, 2, 5], "", {PAD}, decode)


def encoded(prompt: list[int], **more: Any) -> dict[str, Any]:
    ids = [*prompt, 5, 6]
    return {
        "input_ids": ids,
        "labels": [*[-100] * len(prompt), 5, 6],
        "length": len(ids),
        "pixel_values": [0.5],
        **more,
    }


@pytest.mark.parametrize(
    ("rollout", "training", "expected"),
    [
        ([1, PAD, PAD, 2], [1, PAD, PAD, 10, 2], [1, PAD, PAD, 2]),  # InternVL: a line more
        ([PAD, 11, 1, PAD, 2], [PAD, 1, PAD, 10, 2], [PAD, 11, 1, PAD, 2]),
        ([1, SOFT, 2], [1, PAD, 10, 2], [1, PAD, 2]),  # its frames
        ([1, 12, PAD, 2], [1, 10, 11, PAD, 2], [1, 12, PAD, 2]),  # Gemma3
        ([1, PAD, PAD, 2, 11], [1, -200, 10, 2, 10], [1, -200, 2, 11]),  # Ovis2.5
    ],
)
def test_training_gets_the_line_breaks_of_the_rollout(
    rollout: list[int], training: list[int], expected: list[int]
) -> None:
    kinds = [int(i < 0 or i == PAD) for i in training]
    sample = encoded(training, token_type_ids=[*kinds, 0, 0], loss_scale=None)
    changed = with_text_of(rollout, sample, {PAD, SOFT}, decode)
    assert changed == {
        "input_ids": [*expected, 5, 6],
        "labels": [*[-100] * len(expected), 5, 6],
        "token_type_ids": [*(int(i < 0 or i == PAD) for i in expected), 0, 0],
        "length": len(expected) + 2,
    }


@pytest.mark.parametrize(
    ("rollout", "training"),
    [
        ([1, PAD, 2], [1, PAD, 2]),
        ([1, 10, 2], [1, 2]),  # no media: no template writes that
        ([1, PAD, 3], [1, PAD, 10, 1]),  # words
        ([1, PAD, PAD], [1, PAD, 10]),  # other pixel limits
        ([1, PAD, 2, PAD], [1, PAD, 10, 2]),
    ],
)
def test_other_prompts_are_left_to_the_check(rollout: list[int], training: list[int]) -> None:
    assert with_text_of(rollout, encoded(training), {PAD, SOFT}, decode) == {}


def test_entries_whose_values_are_not_known_stay_as_they_are() -> None:
    """Positions of a text that becomes shorter are not those of its first tokens."""
    sample = encoded([1, PAD, 10, 2], position_ids=[0, 1, 2, 3, 4, 5])
    assert with_text_of([1, PAD, 2], sample, {PAD, SOFT}, decode) == {}


# --- prompts that `--max_length` cut ---


def row_of(ids: list[int], num_prompt: int) -> dict[str, Any]:
    labels = [-100] * num_prompt + ids[num_prompt:]
    types = torch.tensor([int(i == PAD) for i in ids])
    pixels = torch.zeros(len(ids), 4)
    return {"input_ids": ids, "labels": labels, "mm_token_type_ids": types, "length": len(ids)} | {
        "pixel_values": pixels
    }


@pytest.mark.parametrize(
    ("rollout", "prompt"),
    [
        ([3, 4], [1, 2, 3, 4]),
        ([PAD, PAD, 3, 4], [1, PAD, PAD, 2, 3, 4]),
        ([PAD, PAD, 2, SOFT, 4], [1, PAD, PAD, 2, SOFT, 4]),
        ([2, PAD, 3], [1, 1, 2, PAD, 3]),
        ([PAD], [1, PAD, 2]),  # all text is gone
    ],
)
def test_training_is_given_what_a_cut_left(rollout: list[int], prompt: list[int]) -> None:
    changed = with_cut_prompt(rollout, row_of([*prompt, 5, 6], len(prompt)), {PAD, SOFT})
    whole = [*rollout, 5, 6]
    assert changed.keys() == {"input_ids", "labels", "mm_token_type_ids", "length"}
    assert changed["input_ids"] == whole
    assert changed["labels"] == [-100] * len(rollout) + [5, 6]
    assert changed["mm_token_type_ids"].tolist() == [int(i == PAD) for i in whole]
    assert changed["length"] == len(whole)


@pytest.mark.parametrize(
    ("rollout", "prompt"),
    [
        ([1, 2, 3], [1, 2, 3]),  # nothing was cut
        ([1, 2], [1, 2, 3]),  # on the right
        ([2, 4], [1, 2, 3, 4]),  # in the middle
        ([3, PAD, 4], [1, PAD, PAD, 3, 4]),  # a medium, or a part of one
        ([9, 4], [1, 2, 3, 4]),
        ([PAD, SOFT, 4], [1, PAD, 2, SOFT, 4]),  # side by side, they count as one
        ([0, 1, 2, 3], [1, 2, 3]),  # the rollout saw more
        ([PAD, PAD, 4], [1, -200, 3, 4]),  # another notation, of which no position is known
    ],
)
def test_what_no_cut_explains_stays(rollout: list[int], prompt: list[int]) -> None:
    assert with_cut_prompt(rollout, row_of([*prompt, 5], len(prompt)), {PAD, SOFT}) == {}
