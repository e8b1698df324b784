"""Prompts that cannot be encoded are replaced; duplicates and uneven groups are counted."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from swift_grpo_ext.checks.rows import encoding_error
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from swift_grpo_ext.training.prompts import (
    MAX_CANDIDATES,
    candidate_order,
    replace_failing_prompts,
    warn_duplicates,
    warn_uneven,
)
from tests.rig.ranks import ThreadRanks, run_rank_groups

ROUND = RoundId("train", 3, 1)


def row(words: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}]}


def words_of(row: dict[str, Any]) -> str:
    return str(row["messages"][0]["content"])


class Template:
    """Refuses words in capitals, as ms-swift's template refuses long prompts."""

    placeholder_tokens: ClassVar[list[int]] = []
    special_tokens: ClassVar[list[str]] = []
    tokenizer = SimpleNamespace(convert_ids_to_tokens=list, get_added_vocab=dict)

    def encode(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if words_of(inputs).isupper():
            raise ValueError("too long")
        return {"input_ids": [1]}


# --- replacement ---

SPARE = [row(letter) for letter in "defgh"]


def replaced(
    batch: str, num_ranks: int = 1, round_: RoundId = ROUND, others: Any = SPARE, first: int = 0
) -> list[tuple[str, list[int]]]:
    """Return each rank's rows afterwards, as letters, and the replaced groups. Groups have two
    samples; capitals are bad prompts. `others` are rows, or letters in the order of trying."""
    if isinstance(others, str):
        order = candidate_order(42, round_, first, len(others))
        others = [row(letter) for _, letter in sorted(zip(order, others, strict=True))]
    share = len(batch) // num_ranks

    def work(ranks: ThreadRanks) -> tuple[str, list[int]]:
        rows, groups = replace_failing_prompts(
            [row(letter) for letter in batch[ranks.rank * share : (ranks.rank + 1) * share]],
            others=others,
            round_=round_,
            first_group=first,
            group_size=2,
            seed=42,
            ranks=ranks,
            error_of=partial(encoding_error, Template()),
        )
        assert len({id(row) for row in rows}) == share  # ms-swift changes each sample's own
        return "".join(map(words_of, rows)), groups

    return run_rank_groups(num_ranks, work)


@pytest.mark.parametrize(("round_", "start"), [(ROUND, 0), (RoundId("eval", 3, 1), 7)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_two_bad_groups_at_once(
    num_ranks: int, round_: RoundId, start: int, warnings: list[str]
) -> None:
    """Each gets another row, on whichever ranks it is; rank 0 names both."""
    first, second, *_ = ("defgh"[i] for i in candidate_order(42, round_, start, 5))
    results = replaced("AAbbCCbb", num_ranks, round_, first=start)
    assert "".join(rows for rows, _ in results) == f"{first * 2}bb{second * 2}bb"
    assert [groups for _, groups in results] == [[0, 2]] * num_ranks
    assert len(warnings) == 2
    for warning, group, words in zip(warnings, (0, 2), "AC", strict=True):
        name = f"{round_.phase} round 3.1, group {start + group}"
        expected = f"{name}: the row that asks '{words}' cannot be encoded (ValueError: too long)"
        assert warning.startswith(expected)


def test_without_a_bad_prompt_nothing_changes(warnings: list[str]) -> None:
    assert replaced("bbcc", 2) == [("bb", []), ("cc", [])]
    assert warnings == []


@pytest.mark.parametrize(
    ("batch", "others", "expected"),
    [
        ("AABB", "CdDf", "ddff"),  # each group has another
        ("AABB", "Cd", "dddd"),  # while there are any
        ("bAcc", "d", "ddcc"),  # rows of a group that differ are all looked at
        ("AA", "CCCCCCCCCd", "dd"),
    ],
)
def test_which_prompt_comes(batch: str, others: str, expected: str) -> None:
    assert replaced(batch, others=others)[0][0] == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_where_nothing_is_left_every_rank_says_so(num_ranks: int) -> None:
    message = rf"1 prompts .* for 1 of them {MAX_CANDIDATES} other .*group 0: ValueError: too long"
    with pytest.raises(ValueError, match=message):
        replaced("AAbb", num_ranks, others="ABC")


@pytest.mark.parametrize(
    "change",
    [{"seed": 43}, {"phase": "eval"}, {"number": 0}, {"step": 4}, {"first_group": 7}],
)
def test_the_order_of_candidates_is_the_rounds_own(change: dict[str, Any]) -> None:
    order = candidate_order(42, ROUND, 0, 100)
    assert sorted(order) == list(range(100))
    seed, first_group = change.pop("seed", 42), change.pop("first_group", 0)
    other = candidate_order(seed, ROUND._replace(**change), first_group, 100)
    assert other[:10] != order[:10]


# --- warnings about groups ---


def sample_ids(num_groups: int) -> list[SampleId]:
    return [
        SampleId(phase="train", step=3, number=1, group=group, index=index)
        for group in range(num_groups)
        for index in range(2)
    ]


def test_groups_whose_rows_differ_are_said_once(warnings: list[str]) -> None:
    for uneven in ([], sample_ids(2)[2:3], sample_ids(1)[:1]):
        warn_uneven(uneven)
    [warning] = warnings
    assert warning.startswith("1 groups hold rows that differ, the first in train round 3.1, group")


@pytest.mark.parametrize(
    ("hashes", "count"), [([["a", "b"], ["c"]], 0), ([["a", "b"], ["a"]], 1), ([["a"] * 3], 2)]
)
def test_duplicates_are_counted_over_ranks(
    hashes: list[list[str]], count: int, warnings: list[str]
) -> None:
    for _ in range(2):
        warn_duplicates(hashes, sample_ids(1)[0])
    total = sum(map(len, hashes))
    assert [text.partition(" prompts")[0] for text in warnings] == [
        f"train round 3.1: {count} of {total}"
    ] * bool(count)
