"""Filters, orders, and the groups that stand out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_grpo_ext.tools.view import queries
from swift_grpo_ext.tools.view.table import Follower, Snapshot
from tests.tools.view.runs import Writer, make_rows


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Rounds 0 to 2; one sample was ended by the length limit, one has no reward yet."""
    folder = tmp_path_factory.mktemp("run")
    writer = Writer(folder)
    for step in range(3):
        rows = make_rows(step)
        if step == 1:
            rows[0] = replace(rows[0], finish_reason="length", stop_reason=None)
        if step == 2:
            rows[3] = replace(rows[3], text="(七) a.c")
        writer.write(rows, scored=False)
        writer.score(rows if step < 2 else rows[:3])
    follower = Follower(folder)
    follower.refresh()
    return follower.snapshot


def found(snapshot: Snapshot, **values: str) -> list[str]:
    """step.group.index of the samples, in order."""
    answer = queries.list_samples(snapshot, queries.read_query(values), 0, 50)
    assert answer["count"] == len(answer["rows"])
    return [f"{r['step']}.{r['group']}.{r['index']}" for r in answer["rows"]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": "1"}, "1.0.0 1.0.1 1.1.0 1.1.1"),
        ({"steps": "1:2", "min_reward": "0.5"}, "1.1.1"),
        ({"steps": ":0", "max_reward": "0.5"}, "0.0.0 0.0.1 0.1.0"),
        ({"steps": "2:", "truncated": "yes"}, "2.0.1"),
        ({"steps": "2:", "truncated": "no"}, "2.0.0 2.1.0"),
        ({"finish_reason": "length"}, "1.0.0"),
        ({"fate": "trained", "steps": "2"}, "2.0.0 2.0.1 2.1.0"),
        ({"text": "G1 I0"}, "2.1.0 1.1.0 0.1.0"),
        ({"text": "a.c"}, "2.1.1"),
        ({"text": "g. i1", "steps": "0"}, ""),
        ({"text": "g. i1", "regex": "1", "steps": "0"}, "0.0.1 0.1.1"),
        ({"text": "question 1", "in_prompt": "1", "steps": "0"}, "0.1.0 0.1.1"),
        ({"round": "train.1.0", "group": "1"}, "1.1.0 1.1.1"),
        ({"steps": "2", "sort": "reward", "descending": "1"}, "2.0.0 2.0.1 2.1.0 2.1.1"),
        ({"steps": "1", "sort": "surprisal"}, "1.0.0 1.1.0 1.0.1 1.1.1"),
        ({"steps": "1", "sort": "surprisal", "descending": "1"}, "1.1.1 1.0.1 1.1.0 1.0.0"),
        ({"min_surprisal": "0.58"}, "2.1.1 1.1.1 0.1.1"),
    ],
)  # fmt: skip
def test_filters_and_orders(snapshot: Snapshot, values: dict[str, str], expected: str) -> None:
    assert found(snapshot, **values) == expected.split()


def test_pages(snapshot: Snapshot) -> None:
    query = queries.read_query({})
    pages = [queries.list_samples(snapshot, query, offset, 5) for offset in (0, 5, 10)]
    assert [len(page["rows"]) for page in pages] == [5, 5, 2]
    names = [(r["round"], r["group"], r["index"]) for page in pages for r in page["rows"]]
    assert len(set(names)) == pages[0]["count"] == 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sort": "text"}, "sort=text: expected one of reward"),
        ({"min_reward": "much"}, "min_reward=much: expected a number"),
        ({"steps": "a:b"}, "steps=a:b"),
        ({"round": "train"}, "a round such as train.3.0"),
        ({"text": "(", "regex": "1"}, r"text=\(: no regular expression"),
    ],
)
def test_bad_queries_say_what_was_expected(
    snapshot: Snapshot, values: dict[str, str], message: str
) -> None:
    with pytest.raises(queries.BadQueryError, match=message):
        queries.matching(snapshot, queries.read_query(values))


def test_a_row_keeps_all_of_its_seed(snapshot: Snapshot) -> None:
    [row] = queries.list_samples(snapshot, queries.read_query({"finish_reason": "length"}), 0, 1)[
        "rows"
    ]
    assert row["seed"] == str(2**62 + 100)
    assert row["parts"] == {"Accuracy": 0.0, "Format": 1.0}


def test_groups_of_a_round(snapshot: Snapshot) -> None:
    groups: list[dict[str, Any]] = queries.list_groups(snapshot.rounds[1])
    assert [(g["group"], g["reward"], g["spread"], g["distinct"]) for g in groups] == [
        (0, 0.0, 0.0, 2),
        (1, 0.5, 0.5, 2),
    ]
    assert groups[1]["prompt"] == "<image>Question 1?"


def test_most_different_and_a_selection(snapshot: Snapshot) -> None:
    query = queries.read_query({})
    best = queries.most_different(snapshot, query, 5)
    assert [(g["round"], g["group"], g["spread"]) for g in best[:2]] == [
        ("train.1.0", 1, 0.5),
        ("train.0.0", 1, 0.5),
    ]
    assert best[2]["spread"] == 0
    picked = queries.pick(snapshot, query, 4)
    assert picked[0] == (("train", 1, 0), 1)  # the most different one
    assert (("train", 2, 0), 0) in picked  # the newest
    assert len(picked) == len(set(picked)) <= 4
    assert len(queries.pick(snapshot, query, 100)) == 6


def test_prompts_that_are_no_messages() -> None:
    assert queries.read_messages("Hello") == [{"role": "", "content": "Hello"}]
    parts = '[{"role": "user", "content": [{"type": "image"}]}]'
    assert queries.read_messages(parts) == [{"role": "user", "content": '[{"type": "image"}]'}]
