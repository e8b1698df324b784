"""A resumed session replaces rounds of earlier ones; groups and diversity rows are found."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.record.query import read_group, read_samples
from swift_grpo_ext.record.tables import DIVERSITY
from tests.rig.record.rows import (
    diversity_row,
    open_log,
    read_diversity,
    row_of,
    sample_id,
    write_session,
)


def test_a_round_is_replaced_whole(tmp_path: Path) -> None:
    """The later session drew fewer turns and groups. `test_query.py` has random histories."""
    earlier = [
        sample_id(1, group=g, index=i, turn=t) for g in (0, 1) for i in (0, 1) for t in (0, 1)
    ]
    later = [sample_id(1, index=index) for index in (0, 1)]
    write_session(tmp_path, [row_of(name, seed=0) for name in earlier])
    write_session(tmp_path, [row_of(name, seed=1) for name in later], session=1, start_step=2)
    table = read_samples(tmp_path, columns=["group", "index", "turn", "seed"])
    assert [tuple(row.values()) for row in table.to_pylist()] == [(0, 0, 0, 1), (0, 1, 0, 1)]


def test_a_group_stands_in_its_order(tmp_path: Path) -> None:
    write_session(tmp_path, [row_of(sample_id(3))])
    rows = [
        row_of(sample_id(4, group=group, index=index, turn=turn))
        for group in (0, 1)
        for index in range(4)
        for turn in (0, 1)
    ]
    write_session(tmp_path, rows[::-1], session=1, start_step=4)
    assert read_group(tmp_path, phase="train", step=4, number=0, group=1) == rows[8:]
    for step, group in ((4, 9), (5, 0)):
        message = f"holds no group {group} of train round {step}.0; it has train steps 3 to 4"
        with pytest.raises(ValueError, match=message):
            read_group(tmp_path, phase="train", step=step, number=0, group=group)
    with pytest.raises(ValueError, match="it has no eval rounds"):
        read_group(tmp_path, phase="eval", step=4, number=0, group=0)


def test_a_file_that_lacks_a_column_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_session(tmp_path, [row_of(sample_id(step)) for step in (0, 1)])
    path, _ = sorted((tmp_path / "samples").glob("*-file-*"))
    pq.write_table(pq.read_table(path).drop_columns(["mask"]), path)
    assert read_samples(tmp_path, columns=["step", "mask"])["step"].to_pylist() == [1]
    [message] = caplog.messages
    assert message.startswith(f"{path} cannot be read (")


# --- what the monitor measured ---


def test_diversity_comes_back_in_the_order_of_steps(tmp_path: Path) -> None:
    assert read_diversity(tmp_path) == []
    rich = {
        "metrics": {"vendi": 0.1, "数字": float("inf")},
        "collisions": [{"kind": "shared", "samples": [{"rank": 0, "seed": None}], "bits": 0.1}],
        "worst_groups": [3, 1],
        "remedy": "remedy_collapse",
        "alarm": "数字 <>",
    }
    first = [diversity_row(0, **rich), diversity_row(1, "eval"), diversity_row(1)]
    batch = first[1]  # an evaluation has a row for each
    log = open_log(tmp_path)
    for row in (*first, batch, diversity_row(2)):
        log.append([row], DIVERSITY)
    log.flush()
    assert read_diversity(tmp_path) == [first[0], first[1], batch, first[2], diversity_row(2)]
    log.finish()
    assert read_diversity(tmp_path) == [first[0], first[1], batch, first[2], diversity_row(2)]
    resumed = open_log(tmp_path, session=1, start_step=1)
    resumed.append([again := diversity_row(1, num_samples=7)], DIVERSITY)
    resumed.flush()
    assert read_diversity(tmp_path) == [first[0], first[1], batch, again]
