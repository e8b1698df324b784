"""What a rollout says of a sample against what training sees."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_grpo_ext.training.agreement import (
    DisagreementError,
    Gap,
    check_counts,
    gap_limit,
)


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


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_nan_is_the_largest_wherever_it_stands(order: tuple[int, ...]) -> None:
    gaps = [Gap(float("nan"), 1, float("nan")), Gap(1.0, 1, 1.0), Gap(3.0, 1, 3.0)]
    whole = sum((gaps[n] for n in order), Gap())
    assert math.isnan(whole.mean)
    assert math.isnan(whole.largest)


def test_limits_by_temperature() -> None:
    """Rounding errors of logits are divided by it too; above 1 the limit keeps its margin."""
    assert gap_limit(32, 0.25) == 4 * gap_limit(32, 1.0) == 4 * gap_limit(32, 3.0)


def test_limits_by_precision() -> None:
    assert gap_limit(32) < gap_limit(16) == gap_limit(8)
