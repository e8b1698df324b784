"""Whole groups leave, whole groups come (SPEC M1)."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_grpo_ext.sampling.replacement import (
    MAX_CANDIDATES,
    NoReplacementError,
    Replaced,
    candidate_order,
    replace_groups,
)
from swift_grpo_ext.sampling.rounds import Round
from tests.ranks import Gather, run_ranks

ROUND = Round(phase="train", step=3, number=0)


def row(name: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": name}]}


def name_of(row: dict[str, Any]) -> str:
    return str(row["messages"][0]["content"])


def replace(
    batch: str, group_size: int, *, bad: str, spare: str, ranks: int = 1
) -> list[tuple[str, list[Replaced]]]:
    """Each rank's rows after the replacement, as letters, and what it was told."""
    share = len(batch) // ranks

    def work(rank: int, gather: Gather) -> tuple[str, list[Replaced]]:
        rows, replaced = replace_groups(
            [row(name) for name in batch[rank * share : (rank + 1) * share]],
            start=rank * share,
            group_size=group_size,
            error_of=lambda row: "it is bad" if name_of(row) in bad else None,
            draw=lambda n: (lambda: row(spare[n])) if n < len(spare) else None,
            gather=gather,
        )
        return "".join(map(name_of, rows)), replaced

    return run_ranks(ranks, work)


def test_the_case_that_ms_swift_gets_wrong() -> None:
    """There, samples that fail leave one by one, and groups end up with several prompts."""
    [(rows, replaced)] = replace("BBBBAAAACCCC", 4, bad="A", spare="X")
    assert rows == "BBBBXXXXCCCC"
    assert [(r.group, r.error, name_of(r.row)) for r in replaced] == [(1, "it is bad", "A")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_a_group_on_several_ranks_gets_one_prompt(ranks: int) -> None:
    results = replace("AAAABBBBCCCC", 4, bad="ACY", spare="YXZ", ranks=ranks)
    assert "".join(rows for rows, _ in results) == "ZZZZBBBBXXXX"
    assert all([r.group for r in replaced] == [0, 2] for _, replaced in results)


def test_a_prompt_of_the_batch_is_not_taken_while_there_are_others() -> None:
    assert replace("AABB", 2, bad="A", spare="BABC")[0][0] == "CCBB"
    assert replace("AABB", 2, bad="A", spare="BA")[0][0] == "BBBB"


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_nothing_is_left_every_rank_says_so(ranks: int) -> None:
    message = rf"group 0: it is bad.*raise --max_length|{MAX_CANDIDATES} other rows"
    with pytest.raises(NoReplacementError, match=message):
        replace("AABB", 2, bad="AXY", spare="AXY", ranks=ranks)


def test_rows_of_a_group_that_differ_are_all_looked_at() -> None:
    [(rows, replaced)] = replace("ABCC", 2, bad="B", spare="X")
    assert rows == "XXCC"
    assert len(replaced) == 1


def test_each_sample_has_a_row_of_its_own() -> None:
    rows, _ = replace_groups(
        [row("A"), row("A")],
        start=0,
        group_size=2,
        error_of=lambda row: "bad" if name_of(row) == "A" else None,
        draw=lambda n: lambda: row("X"),
        gather=lambda value: [value],
    )
    rows[0]["messages"].pop()
    assert name_of(rows[1]) == "X"


@given(
    batch=st.lists(st.sampled_from("ABCDEFGH"), min_size=1, max_size=4),
    group_size=st.integers(1, 4),
    bad=st.sets(st.sampled_from("ABCDEFGHUVW")),
)
def test_groups_always_hold_one_prompt_that_is_good(
    batch: list[str], group_size: int, bad: set[str]
) -> None:
    rows_before = "".join(name * group_size for name in batch)
    [(rows, replaced)] = replace(rows_before, group_size, bad="".join(bad), spare="UVWXYZ012")
    groups = [rows[i : i + group_size] for i in range(0, len(rows), group_size)]
    assert len(groups) == len(batch)
    for name, group in zip(batch, groups, strict=True):
        assert len(set(group)) == 1
        assert group[0] not in bad
        assert group[0] == name or name in bad
    assert len(replaced) == sum(name in bad for name in batch)


def test_the_order_of_candidates_is_the_rounds_own() -> None:
    order = list(candidate_order(42, ROUND, 100))
    assert sorted(order) == list(range(100))
    assert order == list(candidate_order(42, ROUND, 100))
    others = [
        candidate_order(43, ROUND, 100),
        candidate_order(42, Round(phase="eval", step=3, number=0), 100),
        candidate_order(42, Round(phase="train", step=3, number=1), 100),
        candidate_order(42, Round(phase="train", step=4, number=0), 100),
    ]
    for other in others:
        assert list(islice(other, 10)) != order[:10]


def test_two_failing_groups_get_two_prompts() -> None:
    """Also where the data set holds the first one's prompt again."""
    [(rows, replaced)] = replace("AABB", 2, bad="ABC", spare="XCXY")
    assert rows == "XXYY"
    assert [r.group for r in replaced] == [0, 1]
