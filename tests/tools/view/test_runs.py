"""What is read of a run while it goes on, filters, orders, and groups."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.record.tables import DIVERSITY
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view import runs
from swift_grpo_ext.tools.view.runs import (
    Follower,
    Snapshot,
    facets,
    list_groups,
    list_samples,
    matching,
)
from tests.record.rows import diversity_row, open_log
from tests.tools.view.runs import Writer, make_rows, make_run


def test_a_run_is_followed_from_before_its_first_round(tmp_path: Path) -> None:
    writer, follower = Writer(tmp_path), Follower(tmp_path)
    assert follower.refresh()
    assert (follower.snapshot.is_whole, follower.snapshot.table.num_rows) == (True, 0)
    assert not follower.refresh()
    writer.write(make_rows(0))
    assert follower.refresh()
    assert follower.snapshot.table.num_rows == 4
    [first] = follower.snapshot.rounds.values()
    assert not follower.refresh()  # nothing is new
    rows = make_rows(1)
    writer.write(rows, scored=False)
    assert follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [None] * 4 + [0, 0, 0, 1]
    assert list_groups(follower.snapshot, RoundId("train", 1, 0))[0]["reward"] is None
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
        ({"text": "question 1", "where": "prompt", "steps": "0"}, "0.1.0 0.1.1"),
        ({"text": '"s1', "where": "columns", "steps": "0"}, "0.1.0 0.1.1"),
        ({"min_reward.Accuracy": "1", "max_reward.Format": "1"}, "1.1.1 0.1.1"),
        ({"steps": "0", "sort": "-reward.Accuracy"}, "0.1.1 0.0.0 0.0.1 0.1.0"),
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
    assert (sample["text"], sample["question"]) == ("g0 i0", "Question 0?")
    assert sample["columns"] == {"solution": "s0"}


def test_menus(snapshot: Snapshot) -> None:
    menus = facets(snapshot)
    assert menus["finish_reason"] == [("stop", 11), ("length", 1)]
    assert sorted(menus["truncated"]) == [("false", 6), ("true", 5)]
    assert menus["stop_reason"] == []


def test_groups_of_a_round(snapshot: Snapshot) -> None:
    _, scored = list_groups(snapshot, RoundId("train", 1, 0))
    assert scored == {
        **{"round": "train.1.0", "group": 1, "prompt": "Question 1?", "num_media": 1},
        **{"columns": {"solution": "s1"}},
        **{"samples": 2, "distinct": 2, "rewards": [0.0, 1.0], "reward": 0.5, "spread": 0.5},
    }
    _, partly_scored = list_groups(snapshot, RoundId("train", 2, 0))
    assert (partly_scored["rewards"], partly_scored["spread"]) == ([0.0, None], 0.0)


# --- what cannot be read, and how much is ---

CALLS: dict[str, tuple[Any, str]] = {
    "stat": (Path, "stat"),
    "footer": (pq, "read_metadata"),
    "open": (pq, "ParquetFile"),
    "rows": (pq.ParquetFile, "read_row_groups"),
}


class Disk:
    """Counts calls for files of a record, and lets some of them fail as a file server's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: tuple[str, str] | None = None
        """One of `CALLS`, and a table."""

        self.counts: Counter[str] = Counter()
        for call, (owner, name) in reversed(CALLS.items()):  # a class's method before the class
            monkeypatch.setattr(owner, name, self._watched(call, getattr(owner, name)))

    def _watched(self, call: str, upstream: Callable[..., Any]) -> Callable[..., Any]:
        def watched(of: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[call] += str(of).endswith(".parquet")
            failing, table = self.failing or ("", "")
            if failing == call and (call == "rows" or f"/{table}/session-" in str(of)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(of))
            return upstream(of, *args, **kwargs)

        return watched


@pytest.mark.parametrize("table", ["samples", "rewards"])
@pytest.mark.parametrize("call", ["footer", "open", "rows"])
def test_a_read_that_fails_is_tried_again(
    call: str, table: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As a file server's does: it is no damage, and what was read before stays in sight."""
    writer, follower, disk = Writer(tmp_path), Follower(tmp_path), Disk(monkeypatch)
    for step in (0, 1):
        writer.write(make_rows(step))
    writer.finish()  # merges them
    disk.failing = call, table
    follower.refresh()
    version = follower.snapshot.version
    assert not follower.refresh()  # nothing is new, and nothing is told twice
    assert follower.snapshot.version == version
    disk.failing = None
    assert follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [0, 0, 0, 1] * 2
    assert not follower.refresh()
    told = [*caplog.messages]
    assert 1 <= len(told) <= 2
    for step in (2, 3):
        writer.write(make_rows(step))
    writer.finish()
    disk.failing = call, table
    for _ in range(2):
        follower.refresh()
        assert follower.snapshot.rounds["train", 0, 0].rows["reward"].to_pylist() == [0, 0, 0, 1]
    disk.failing = None
    follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [0, 0, 0, 1] * 4
    assert len(caplog.messages) == 2 * len(told)
    assert all("cannot be read now ([Errno 116] Stale file" in text for text in caplog.messages)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_damaged_file_is_named_once_and_read_when_it_is_restored(
    is_whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, follower = Writer(tmp_path), Follower(tmp_path)
    writer.write(make_rows(0))
    [path] = (tmp_path / "samples").iterdir()
    sound = path.read_bytes()
    footer = pq.read_metadata(path).row_group(0)
    columns = [footer.column(i) for i in range(footer.num_columns)]
    [seeds] = [column for column in columns if column.path_in_schema == "seed"]
    damaged = bytearray(sound)
    damaged[seeds.data_page_offset + seeds.total_compressed_size - 1] ^= 1
    path.write_bytes(damaged if is_whole else sound[:-1])
    for _ in range(3):
        follower.refresh()
        assert follower.snapshot.table.num_rows == 0
    [message] = caplog.messages
    assert message.startswith(f"{path} is damaged (")
    path.write_bytes(sound)
    assert follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [0, 0, 0, 1]
    assert len(caplog.messages) == 1


def test_what_the_monitor_measured_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, follower, disk = open_log(tmp_path), Follower(tmp_path), Disk(monkeypatch)
    for step in range(3):
        log.append([diversity_row(step)], DIVERSITY)
    log.flush()
    for opened in (3, 0):
        disk.counts.clear()
        assert [row.round.step for row in follower.diversity.read()] == [0, 1, 2]
        assert disk.counts["open"] == opened
    log.append([diversity_row(3)], DIVERSITY)
    log.flush()
    disk.failing = "open", "diversity"
    assert [row.round.step for row in follower.diversity.read()] == [0, 1, 2]
    disk.failing = None
    assert [row.round.step for row in follower.diversity.read()] == [0, 1, 2, 3]


def test_a_poll_costs_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files there are."""
    writer, follower, disk = Writer(tmp_path), Follower(tmp_path), Disk(monkeypatch)
    for step in range(40):
        writer.write(make_rows(step))

    def counted() -> dict[str, int]:
        disk.counts.clear()
        follower.refresh()
        return {call: disk.counts[call] for call in ("footer", "open", "stat")}

    assert counted() == {"footer": 0, "open": 80, "stat": 0}  # their names say their rounds
    assert counted() == {"footer": 0, "open": 0, "stat": 0}
    writer.write(make_rows(40))
    assert counted() == {"footer": 0, "open": 2, "stat": 0}
    assert follower.snapshot.table.num_rows == 4 * 41
    for path in sorted((tmp_path / "samples").iterdir())[:10]:  # as a bounded record does
        path.unlink()
    assert counted() == {"footer": 0, "open": 0, "stat": 0}
    assert follower.snapshot.table.num_rows == 4 * 31
    writer.finish()
    assert counted()["footer"] == 2  # of the merged file of each table
    assert follower.snapshot.table.num_rows == 4 * 31
    assert counted() == {"footer": 0, "open": 0, "stat": 0}
