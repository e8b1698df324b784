"""What is read of a run, and that it follows the run's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from swift_grpo_ext.tools.view import runs
from swift_grpo_ext.tools.view.runs import Follower, mean_surprisal
from tests.tools.view.runs import Writer, make_rows, make_run


def names(follower: Follower) -> list[tuple[str, int, int]]:
    return [tuple(name) for name in follower.snapshot.rounds]


def test_rounds_come_newest_first_with_their_scores(tmp_path: Path) -> None:
    follower = Follower(make_run(tmp_path / "run"))
    assert follower.refresh()
    assert names(follower) == [("train", 2, 0), ("train", 1, 0), ("train", 0, 0)]
    snapshot = follower.snapshot
    assert (snapshot.is_whole, snapshot.problem) == (True, "")
    assert snapshot.functions == ["Accuracy", "Format"]
    row = snapshot.table.slice(3, 1).to_pylist()[0]
    assert (row["group"], row["index"], row["reward"], row["advantage"]) == (1, 1, 1.0, 0.5)
    assert row["part:Accuracy"] == 1.0
    assert row["surprisal"] == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert snapshot.prompts[row["fingerprint"]].media == [str(tmp_path / "run/images/1.png")]
    group = snapshot.groups.slice(1, 1).to_pylist()[0]
    assert (group["step"], group["group"], group["samples"], group["distinct"]) == (2, 1, 2, 2)
    assert (group["reward"], group["spread"], group["rewards"]) == (0.5, 0.5, [0.0, 1.0])


def test_a_run_is_followed(tmp_path: Path) -> None:
    writer, follower = Writer(tmp_path), Follower(tmp_path)
    writer.write(make_rows(0))
    assert follower.refresh()
    [first] = follower.snapshot.rounds.values()
    assert not follower.refresh()  # nothing is new
    rows = make_rows(1)
    writer.write(rows, scored=False)
    assert follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [None] * 4 + [0, 0, 0, 1]
    writer.score(rows)
    assert follower.refresh()
    assert follower.snapshot.table["reward"].to_pylist() == [0, 0, 0, 1] * 2
    assert follower.snapshot.rounds["train", 0, 0] is first  # what did not change is not read again


def test_a_resumed_session_supersedes(tmp_path: Path) -> None:
    follower = Follower(make_run(tmp_path / "run"))
    follower.refresh()
    Writer(tmp_path / "run", session=1, start_step=1).write(make_rows(1, num_groups=1))
    assert follower.refresh()
    assert names(follower) == [("train", 1, 0), ("train", 0, 0)]
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


def test_a_folder_without_record_has_a_problem_until_it_has_one(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    follower.refresh()
    assert "samples does not exist" in follower.snapshot.problem
    assert follower.snapshot.table.num_rows == 0
    Writer(tmp_path).write(make_rows(0))
    assert follower.refresh()
    assert (follower.snapshot.problem, follower.snapshot.table.num_rows) == ("", 4)


def test_mean_surprisal_of_lists_that_are_empty_or_missing() -> None:
    lists = [[-1.0, -3.0], None, [], [-0.5], [-float("inf"), 0.0]]
    found = mean_surprisal(pa.chunked_array([pa.array(lists, pa.list_(pa.float32()))]))
    np.testing.assert_equal(found, [2.0, np.nan, np.nan, 0.5, np.inf])
