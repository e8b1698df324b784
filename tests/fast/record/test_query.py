"""A record is read while its run goes on: damage is left out, and a poll reads what is new (V2)."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.query import Record, read_group, read_samples
from swift_grpo_ext.record.tables import DIVERSITY, SAMPLES
from tests.rig.record.rows import (
    diversity_row,
    open_log,
    read_diversity,
    row_of,
    sample_id,
    write_session,
)


def files_of(folder: Path) -> list[Path]:
    return [file.path for file in record_files(SAMPLES.folder(folder))]


def write(folder: Path, *steps: int) -> None:
    """Write a session with a round for each step, each in its own file."""
    log = open_log(folder, session=len(files_of(folder)), start_step=min(steps, default=0))
    for step in steps:
        log.append([row_of(sample_id(step))])
    log.flush()


def steps_of(record: Record) -> list[int]:
    return [row["step"] for row in record.rows("select step from samples order by step")]


def test_flipped_bits_are_named_or_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DuckDB alone would read other values for most; pyarrow reads some headers that DuckDB
    cannot."""
    write(tmp_path, 0)
    [path] = files_of(tmp_path)
    sound, expected = path.read_bytes(), read_samples(tmp_path)
    rng = random.Random(0)
    num_named = 0
    for _ in range(30):
        flipped = bytearray(sound)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        caplog.clear()
        found = read_samples(tmp_path)
        if found.num_rows:
            assert found.equals(expected)
        else:
            assert f"{path} cannot be read (" in caplog.text
            num_named += 1
    assert num_named > 15


def with_columns(path: Path, *names: str, **others: pa.DataType) -> bytes:
    """Return a file without some columns, or with empty ones in their place."""
    rows, content = pq.read_table(path), pa.BufferOutputStream()
    for name, kind in others.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, name, pa.nulls(rows.num_rows, kind))
    pq.write_table(rows.drop_columns([*names]), content)
    return content.getvalue().to_pybytes()


DAMAGE: dict[str, Callable[[Path], bytes]] = {
    "cut": lambda path: path.read_bytes()[:-1],
    "without a column": lambda path: with_columns(path, "mask"),
    "without names": lambda path: with_columns(path, phase=pa.utf8()),  # by a bit of its footer
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_once_and_read_when_it_is_restored(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 0, 1)
    path = files_of(tmp_path)[1]
    sound = path.read_bytes()
    path.write_bytes(DAMAGE[damage](path))
    record = Record(tmp_path)
    assert [record.refresh() for _ in range(3)] == [True, False, False]
    assert steps_of(record) == [0]
    [message] = caplog.messages
    expected = rf"{path} cannot be read \(.{{9}}.*rows are left out.*restore it"
    assert re.match(expected, message, re.S)
    path.write_bytes(sound)
    assert record.refresh()
    assert steps_of(record) == [0, 1]
    assert len(caplog.messages) == 1


def test_a_poll_reads_what_is_new_and_tries_again_what_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server's failure counts as no damage; rows that were read before stay."""
    upstream, opened, fails = pq.ParquetFile, list[Path](), False

    def file(path: Path, **options: Any) -> pq.ParquetFile:
        opened.append(path)
        if fails:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return upstream(path, **options)

    monkeypatch.setattr(pq, "ParquetFile", file)
    record = Record(tmp_path)
    for steps, num_new in ((range(5), 5), (range(5, 6), 1), (range(0), 0)):
        write(tmp_path, *steps)
        opened.clear()
        assert record.refresh() == bool(num_new)
        assert len(opened) == num_new
    write(tmp_path, 6)
    fails = True
    assert [record.refresh() for _ in range(2)] == [False, False]
    assert steps_of(record) == [*range(6)]
    [message] = caplog.messages
    assert "cannot be read ([Errno 116] Stale file" in message
    fails = False
    assert record.refresh()
    for path in files_of(tmp_path)[:2]:  # as a bounded record does
        path.unlink()
    assert steps_of(record) == [*range(2, 7)]  # a query looks for files that have gone


# --- one group, and what the monitor measured ---


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


def test_diversity_comes_back_in_the_order_of_steps(tmp_path: Path) -> None:
    assert read_diversity(tmp_path) == []
    rich = {
        "metrics": {"vendi": 0.1, "数字": float("inf")},
        "collisions": [{"kind": "shared", "samples": [{"rank": 0, "seed": None}], "bits": 0.1}],
        "worst_groups": [3, 1],
        "remedy": "remedy_collapse",
        "alarm": "数字 <>",
    }
    batch = diversity_row(1, "eval")  # an evaluation has a row for each
    first, second = diversity_row(0, **rich), diversity_row(1)
    log = open_log(tmp_path)
    for row in (first, batch, second, batch, diversity_row(2)):
        log.append([row], DIVERSITY)
    log.finish()
    assert read_diversity(tmp_path) == [first, batch, batch, second, diversity_row(2)]
    resumed = open_log(tmp_path, session=1, start_step=1)
    resumed.append([again := diversity_row(1, num_samples=7)], DIVERSITY)
    resumed.flush()
    assert read_diversity(tmp_path) == [first, batch, batch, again]
