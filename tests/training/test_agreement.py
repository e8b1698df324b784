"""What a rollout says of a sample against what training sees."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_grpo_ext.training.agreement import (
    DisagreementError,
    Gap,
    check_counts,
    check_prompt,
    gap_limit,
)

IDS = st.lists(st.integers(0, 5), max_size=8)


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
    message = r"a prompt of 2 tokens .* from token 0 on \(\[3, 4\] against \[1, 2, 3, 4, 5\]\)"
    with pytest.raises(DisagreementError, match=message):
        check_prompt("sample 1", [3, 4], [1, 2, 3, 4, 5, 6], "")


def test_counts() -> None:
    check_counts("sample 1", [1, 2], [-0.1, -0.2])
    check_counts("sample 1", [1, 2], None)
    with pytest.raises(DisagreementError, match="sample 1: 2 sampled tokens and 1 log-prob"):
        check_counts("sample 1", [1, 2], [-0.1])


@given(st.lists(st.lists(st.floats(0, 10), min_size=1), max_size=4))
def test_gaps_of_batches_and_ranks_add_up(batches: list[list[float]]) -> None:
    gaps = [Gap(sum(values), len(values), max(values)) for values in batches]
    whole = reduce(add, gaps, Gap())
    values = [value for batch in batches for value in batch]
    assert whole.count == len(values)
    assert whole.mean == pytest.approx(sum(values) / len(values) if values else 0)
    assert whole.largest == max(values, default=0)


def test_limits_by_precision() -> None:
    assert gap_limit(32) < gap_limit(16) == gap_limit(8)
