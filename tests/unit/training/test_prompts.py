"""A prompt that cannot be encoded is replaced as a whole group, the same on each rank (M1).
Duplicates and uneven groups are counted (G3, G4)."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from swift_grpo_ext.training.prompts import (
    MAX_CANDIDATES,
    candidate_order,
    replace_failing_prompts,
    warn_duplicates,
    warn_uneven,
)
from tests.rig.ranks import ThreadRanks, run_rank_groups

ROUND, FIRST = RoundId("eval", 3, 1), 7


def row(words: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}]}


def words_of(row: Any) -> str:
    return row["messages"][0]["content"]


def replaced(batch: str, others: str, num_ranks: int = 1) -> list[tuple[str, list[int]]]:
    """Return each rank's rows afterwards, as letters, and the replaced groups. Groups have two
    samples; capitals are bad prompts. `others` are the other rows, in the order of trying."""
    order = candidate_order(42, ROUND, FIRST, len(others))
    share = len(batch) // num_ranks

    def work(ranks: ThreadRanks) -> tuple[str, list[int]]:
        rows, groups = replace_failing_prompts(
            [row(letter) for letter in batch[ranks.rank * share : (ranks.rank + 1) * share]],
            others=[row(letter) for _, letter in sorted(zip(order, others, strict=True))],
            round_=ROUND,
            first_group=FIRST,
            group_size=2,
            seed=42,
            ranks=ranks,
            error_of=lambda row: "too long" if words_of(row).isupper() else None,
        )
        assert len({id(row) for row in rows}) == share  # ms-swift changes each sample's own
        return "".join(map(words_of, rows)), groups

    return run_rank_groups(num_ranks, work)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_two_bad_groups_at_once(num_ranks: int, warnings: list[str]) -> None:
    """Each gets another row, on whichever ranks it is; rank 0 names both."""
    results = replaced("AAbbCCbb", "defgh", num_ranks)
    assert "".join(rows for rows, _ in results) == "ddbbeebb"
    assert [groups for _, groups in results] == [[0, 2]] * num_ranks
    assert len(warnings) == 2
    for warning, group, words in zip(warnings, (7, 9), "AC", strict=True):
        name = f"eval round 3.1, group {group}: the row that asks '{words}'"
        assert warning.startswith(f"{name} cannot be encoded (too long)")


@pytest.mark.parametrize(
    ("batch", "others", "expected"),
    [
        ("bbcc", "d", "bbcc"),
        ("AABB", "CdDf", "ddff"),  # each group has another
        ("AABB", "Cd", "dddd"),  # while there are any
        ("bAcc", "d", "ddcc"),  # rows of a group that differ are all looked at
        ("AA", "CCCCCCCCCd", "dd"),
    ],
)
def test_which_prompt_comes(batch: str, others: str, expected: str, warnings: list[str]) -> None:
    assert replaced(batch, others)[0][0] == expected
    assert bool(warnings) == (batch != expected)


def test_where_nothing_is_left_every_rank_says_so() -> None:
    message = rf"1 prompts .* for 1 of them {MAX_CANDIDATES} other .*group 0: too long"
    with pytest.raises(ValueError, match=message):
        replaced("AAbb", "ABC", num_ranks=2)


def test_the_order_of_candidates_is_the_rounds_own() -> None:
    orders = [
        candidate_order(seed, round_, first_group, 100)
        for seed, round_, first_group in (
            (42, ROUND, 0),
            (43, ROUND, 0),
            (42, ROUND._replace(phase="train"), 0),
            (42, ROUND._replace(number=0), 0),
            (42, ROUND._replace(step=4), 0),
            (42, ROUND, 7),
        )
    ]
    assert sorted(orders[0]) == list(range(100))
    assert len({tuple(order[:10]) for order in orders}) == len(orders)


# --- warnings about groups ---


def name(group: int, index: int) -> SampleId:
    return SampleId(phase="train", step=3, number=1, group=group, index=index)


def test_groups_with_different_rows_are_warned_of_once(warnings: list[str]) -> None:
    for uneven in ([], [name(1, 0)], [name(0, 0)]):
        warn_uneven(uneven)
    [warning] = warnings
    assert warning.startswith("1 groups hold rows that differ, the first in train round 3.1, group")


def test_duplicates_are_counted_over_ranks(warnings: list[str]) -> None:
    warn_duplicates([["a", "b"], ["c"]], name(0, 0))
    assert warnings == []
    for _ in range(2):
        warn_duplicates([["a", "b", "b"], ["a"]], name(0, 0))
    [warning] = warnings
    assert warning.startswith("train round 3.1: 2 of 4 prompts")
