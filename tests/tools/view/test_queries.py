"""Filters, orders, and the groups that stand out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.tools.view import queries
from swift_grpo_ext.tools.view.runs import Follower, Snapshot
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


def names(snapshot: Snapshot, **values: str) -> list[str]:
    """Return step.group.index of the samples that match, in order."""
    samples = queries.list_samples(snapshot, queries.matching(snapshot, values))
    return [f"{s['step']}.{s['group']}.{s['index']}" for s in samples]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": "1"}, "1.0.0 1.0.1 1.1.0 1.1.1"),
        ({"steps": "1:2", "min_reward": "0.5"}, "1.1.1"),
        ({"steps": ":0", "max_reward": "0.5"}, "0.0.0 0.0.1 0.1.0"),
        ({"steps": "2:", "truncated": "true"}, "2.0.1"),
        ({"steps": "2:", "truncated": "false"}, "2.0.0 2.1.0"),
        ({"finish_reason": "length"}, "1.0.0"),
        ({"fate": "trained", "steps": "2"}, "2.0.0 2.0.1 2.1.0"),
        ({"text": "G1 I0"}, "2.1.0 1.1.0 0.1.0"),
        ({"text": "a.c"}, "2.1.1"),
        ({"text": "g. i1", "steps": "0"}, ""),
        ({"text": "g. i1", "regex": "1", "steps": "0"}, "0.0.1 0.1.1"),
        ({"text": "question 1", "in_prompt": "1", "steps": "0"}, "0.1.0 0.1.1"),
        ({"steps": "2", "sort": "-reward"}, "2.0.0 2.0.1 2.1.0 2.1.1"),
        ({"steps": "1", "sort": "surprisal"}, "1.0.0 1.1.0 1.0.1 1.1.1"),
        ({"steps": "1", "sort": "-surprisal"}, "1.1.1 1.0.1 1.1.0 1.0.0"),
        ({"steps": "2", "sort": "reward"}, "2.0.0 2.0.1 2.1.0 2.1.1"),
        ({"steps": "3:"}, ""),
        ({"min_surprisal": "0.58"}, "2.1.1 1.1.1 0.1.1"),
    ],
)  # fmt: skip
def test_filters_and_orders(snapshot: Snapshot, values: dict[str, str], expected: str) -> None:
    assert names(snapshot, **values) == expected.split()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sort": "text"}, "sort=text: expected one of reward"),
        ({"min_reward": "much"}, "min_reward=much: expected a number"),
        ({"steps": "a:b"}, "steps=a:b"),
        ({"text": "(", "regex": "1"}, r"text=\(: no regular expression"),
    ],
)
def test_bad_queries_say_what_was_expected(
    snapshot: Snapshot, values: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        queries.matching(snapshot, values)


def test_a_sample_as_a_list_shows_it(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_TEXT", 5)
    rows = queries.matching(snapshot, {"finish_reason": "length"})
    [sample] = queries.list_samples(snapshot, rows)
    assert sample["seed"] == 2**62 + 100
    assert sample["parts"] == {"Accuracy": 0.0, "Format": 1.0}
    assert (sample["round"], sample["num_media"]) == ("train.1.0", 1)
    assert sample["text"] == "g0 i0"


def test_menus(snapshot: Snapshot) -> None:
    menus = queries.facets(snapshot)
    assert menus["finish_reason"] == [("stop", 11), ("length", 1)]
    assert sorted(menus["truncated"]) == [("false", 6), ("true", 5)]
    assert menus["stop_reason"] == []


def test_groups_of_a_round_and_of_the_run(snapshot: Snapshot) -> None:
    groups = queries.list_groups(snapshot, RoundName("train", 1, 0))
    assert [(g["group"], g["reward"], g["spread"], g["distinct"]) for g in groups] == [
        (0, 0.0, 0.0, 2),
        (1, 0.5, 0.5, 2),
    ]
    assert (groups[1]["prompt"], groups[1]["num_media"]) == ("<image>Question 1?", 1)
    different = queries.list_groups(snapshot, limit=3)
    assert [(g["round"], g["group"], g["spread"]) for g in different] == [
        ("train.1.0", 1, 0.5),  # of equals, the newest first
        ("train.0.0", 1, 0.5),
        ("train.2.0", 0, 0.0),  # group 1 has one reward
    ]
    assert [g["step"] for g in queries.list_groups(snapshot, steps="2")] == [2, 2]


@pytest.mark.parametrize(
    ("steps", "count", "expected"),
    [
        ("", 4, "1.1 0.0 1.0 2.1"),
        ("", 100, "0.0 0.1 1.0 1.1 2.0 2.1"),
        ("1:", 1, "1.0"),
        ("7:", 4, ""),
    ],
)
def test_a_selection(snapshot: Snapshot, steps: str, count: int, expected: str) -> None:
    """A quarter are the most different groups; the others are spread over the steps."""
    picked = queries.pick_groups(snapshot, steps, count)
    places = [f"{group['step']}.{group['group']}" for group in picked]
    if count == 100:
        places.sort()
    assert places == expected.split()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("Hello", {"role": "", "content": "Hello"}),
        ("[]", {"role": "", "content": ""}),
        (
            '[{"role": "user", "content": [{"type": "image"}]}]',
            {"role": "user", "content": '[{"type": "image"}]'},
        ),
    ],
)
def test_prompts(prompt: str, message: dict[str, str]) -> None:
    assert queries.read_messages(prompt) == [message]
