"""What is read of a run while it goes on, filters, orders, and groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.tools.view import runs
from swift_grpo_ext.tools.view.runs import (
    Follower,
    Snapshot,
    facets,
    list_groups,
    list_samples,
    matching,
)
from tests.tools.view.runs import Writer, make_rows, make_run


def test_a_run_is_followed_from_before_its_first_round(tmp_path: Path) -> None:
    writer, follower = Writer(tmp_path), Follower(tmp_path)
    assert follower.refresh()
    assert "samples does not exist" in follower.snapshot.problem
    assert follower.snapshot.table.num_rows == 0
    assert not follower.refresh()
    writer.write(make_rows(0))
    assert follower.refresh()
    assert (follower.snapshot.problem, follower.snapshot.table.num_rows) == ("", 4)
    [first] = follower.snapshot.rounds.values()
    assert not follower.refresh()  # nothing is new
    rows = make_rows(1)
    writer.write(rows, scored=False)
    assert follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [None] * 4 + [0, 0, 0, 1]
    assert list_groups(follower.snapshot, RoundName("train", 1, 0))[0]["reward"] is None
    writer.score(rows)
    assert follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [0, 0, 0, 1] * 2
    assert follower.snapshot.rounds["train", 0, 0] is first  # what did not change is not read again


def test_turns_share_their_sample_s_score(tmp_path: Path) -> None:
    writer, follower = Writer(tmp_path), Follower(tmp_path)
    first = make_rows(0)
    later = [replace(r, sample_id=replace(r.sample_id, turn=1)) for r in first if r.seed % 2]
    writer.write([*first, *later], scored=False)
    writer.score(first)
    follower.refresh()
    columns = [follower.snapshot.table[name] for name in ("group", "index", "turn", "reward")]
    assert list(zip(*(column.to_pylist() for column in columns), strict=True)) == [
        (0, 0, 0, 0.0), (0, 1, 0, 0.0), (0, 1, 1, 0.0),
        (1, 0, 0, 0.0), (1, 1, 0, 1.0), (1, 1, 1, 1.0),
    ]  # fmt: skip


def test_rounds_come_newest_first_and_a_resumed_session_supersedes(tmp_path: Path) -> None:
    follower = Follower(make_run(tmp_path / "run"))
    assert follower.refresh()
    assert list(follower.snapshot.rounds) == [("train", step, 0) for step in (2, 1, 0)]
    assert follower.snapshot.functions == ["Accuracy", "Format"]
    Writer(tmp_path / "run", session=1, start_step=1).write(make_rows(1, num_groups=1))
    assert follower.refresh()
    assert list(follower.snapshot.rounds) == [("train", step, 0) for step in (1, 0)]
    assert follower.snapshot.rounds["train", 1, 0].rows.num_rows == 2


def test_blocks_are_published_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "BLOCK_ROUNDS", 1)
    seen: list[tuple[int, bool]] = []

    class Recording(Follower):
        def _publish(self, *args: object, **kwargs: object) -> None:
            super()._publish(*args, **kwargs)
            seen.append((self.snapshot.table.num_rows, self.snapshot.is_whole))

    Recording(make_run(tmp_path / "run")).refresh()
    assert seen == [(4, False), (8, False), (12, True)]


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


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": "1"}, "1.0.0 1.0.1 1.1.0 1.1.1"),
        ({"steps": "1:2", "min_reward": "0.5"}, "1.1.1"),
        ({"steps": ":0", "max_reward": "0.5"}, "0.0.0 0.0.1 0.1.0"),
        ({"steps": "2:", "truncated": "false"}, "2.0.0 2.1.0"),
        ({"finish_reason": "length"}, "1.0.0"),
        ({"text": "G1 I0"}, "2.1.0 1.1.0 0.1.0"),
        ({"text": "a.c"}, "2.1.1"),
        ({"text": "g. i1", "steps": "0"}, ""),
        ({"text": "question 1", "in_prompt": "1", "steps": "0"}, "0.1.0 0.1.1"),
        ({"steps": "1:2", "text": "i1", "sort": "-reward"}, "1.1.1 2.0.1 1.0.1"),
        ({"steps": "2", "sort": "reward"}, "2.0.0 2.0.1 2.1.0 2.1.1"),
    ],
)
def test_filters_and_orders(snapshot: Snapshot, values: dict[str, str], expected: str) -> None:
    """Step, group and index of the samples that match, in order."""
    samples = list_samples(snapshot, matching(snapshot, values))
    assert [f"{s['step']}.{s['group']}.{s['index']}" for s in samples] == expected.split()


def test_bad_queries_say_what_was_expected(snapshot: Snapshot) -> None:
    with pytest.raises(ValueError, match="sort=text: expected one of reward, advantage, num_"):
        matching(snapshot, {"sort": "text"})
    with pytest.raises(ValueError, match="steps=a:b: a is no number"):
        matching(snapshot, {"steps": "a:b"})


def test_a_sample_as_a_list_shows_it(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_TEXT", 5)
    rows = matching(snapshot, {"finish_reason": "length"})
    [sample] = list_samples(snapshot, rows)
    assert sample["seed"] == 2**62 + 100
    assert sample["parts"] == {"Accuracy": 0.0, "Format": 1.0}
    assert (sample["round"], sample["num_media"]) == ("train.1.0", 1)
    assert sample["text"] == "g0 i0"


def test_menus(snapshot: Snapshot) -> None:
    menus = facets(snapshot)
    assert menus["finish_reason"] == [("stop", 11), ("length", 1)]
    assert sorted(menus["truncated"]) == [("false", 6), ("true", 5)]
    assert menus["stop_reason"] == []


def test_groups_of_a_round(snapshot: Snapshot) -> None:
    _, scored = list_groups(snapshot, RoundName("train", 1, 0))
    assert scored == {
        **{"round": "train.1.0", "group": 1, "prompt": "<image>Question 1?", "num_media": 1},
        **{"samples": 2, "distinct": 2, "rewards": [0.0, 1.0], "reward": 0.5, "spread": 0.5},
    }
    _, partly_scored = list_groups(snapshot, RoundName("train", 2, 0))
    assert (partly_scored["rewards"], partly_scored["spread"]) == ([0.0, None], 0.0)
