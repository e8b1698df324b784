"""Queries of a record: random histories against the rule in Python, damage, and a run that goes
on."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.query import Record, read_rewards, read_samples
from swift_grpo_ext.record.tables import REWARDS, SAMPLES, RewardRow, Table
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.record.rows import open_log, row_of, sample_id

NUMBERS = st.lists(st.integers(0, 100), max_size=3)


def score_of(name: SampleId, session: int) -> RewardRow:
    return RewardRow(
        sample_id=name, reward=float(session), rewards=[("Accuracy", None), ("数字", 1.0)],
        truncated=False, replaced=False, fate="trained",
    )  # fmt: skip


@dataclass
class Session:
    start_step: int
    rounds: list[tuple[str, int, int, bool]] = field(default_factory=list)
    """Phase, step, number, and whether it was scored."""

    ends_whole: bool = True
    """False if it is killed: its small files stay."""


ROUNDS = st.tuples(
    st.sampled_from(["train", "eval"]), st.integers(0, 5), st.integers(0, 1), st.booleans()
)
SESSIONS = st.builds(Session, st.integers(0, 4), st.lists(ROUNDS, max_size=6), st.booleans())


@contextmanager
def history(sessions: list[Session]) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        Path(folder, "samples").mkdir()
        for number, session in enumerate(sessions):
            log = open_log(Path(folder), session=number, start_step=session.start_step)
            for phase, step, in_step, is_scored in session.rounds:
                names = [
                    sample_id(step, phase, number=in_step, group=group, index=index, turn=turn)
                    for group, index, turn in ((1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1))
                ]
                log.append([row_of(name, seed=number) for name in names])
                if is_scored:
                    scored = [name for name in names if not name.turn]
                    log.append([score_of(name, number) for name in scored], REWARDS)
                log.flush()
            if session.ends_whole:
                log.finish()
        yield Path(folder)


def files_of(folder: Path) -> list[Path]:
    return [f.path for t in (SAMPLES, REWARDS) for f in record_files(t.folder(folder))]


def round_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["phase"], row["step"], row["number"]


def rows_that_count(folder: Path, damaged: set[Path]) -> tuple[list[Any], list[Any]]:
    """Return the samples and scores of sound files that count by the module's rule."""

    def read(table: Table) -> list[tuple[int, dict[str, Any]]]:
        files = [f for f in record_files(table.folder(folder)) if f.path not in damaged]
        return [(f.start_step, row) for f in files for row in pq.read_table(f.path).to_pylist()]

    def counts(row: dict[str, Any]) -> bool:
        phase, step, _ = round_of(row)
        later = [(start, other) for start, other in samples if other["session"] > row["session"]]
        return not any(
            round_of(other) == round_of(row)
            or start == 0
            or step > start
            or (step == start and phase == "train")
            for start, other in later
        )

    samples = read(SAMPLES)
    counted = [row for _, row in samples if counts(row)]
    places = {(row["session"], round_of(row)) for row in counted}
    scores = [row for _, row in read(REWARDS) if (row["session"], round_of(row)) in places]
    return counted, scores


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(map(str, rows))


@settings(max_examples=60, deadline=None)
@given(st.lists(SESSIONS, max_size=4), NUMBERS, NUMBERS)
def test_each_row_counts_once(
    sessions: list[Session], removed: list[int], damaged: list[int]
) -> None:
    """In histories of killed and resumed sessions, with removed and damaged files."""
    with history(sessions) as folder:
        spoilt = set()
        for numbers in (removed, damaged):
            for number in numbers:
                if paths := [path for path in files_of(folder) if path not in spoilt]:
                    path = paths[number % len(paths)]
                    if numbers is removed:
                        path.unlink()
                    else:
                        path.write_bytes(path.read_bytes()[:-9])
                        spoilt.add(path)
        samples, scores = read_samples(folder), read_rewards(folder)
        expected = rows_that_count(folder, spoilt)
        assert in_order(samples.to_pylist()) == in_order(expected[0])
        assert in_order(scores.to_pylist()) == in_order(expected[1])
        columns = ["phase", "step", "number", "group", "index", "turn"]
        names = [tuple(row.values()) for row in samples.select(columns).to_pylist()]
        assert names == sorted(names)


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
    for _ in range(60):
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
    assert num_named > 30


def test_a_damaged_file_is_named_once_and_read_when_it_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 0, 1)
    path = files_of(tmp_path)[1]
    sound = path.read_bytes()
    path.write_bytes(sound[:-1])
    record = Record(tmp_path)
    assert [record.refresh() for _ in range(3)] == [True, False, False]
    assert steps_of(record) == [0]
    [message] = caplog.messages
    assert message.startswith(f"{path} cannot be read (")
    path.write_bytes(sound)
    assert record.refresh()
    assert steps_of(record) == [0, 1]
    assert len(caplog.messages) == 1


class Disk:
    """Counts checked files, and lets checks fail like a file server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_checked, self.fails = 0, False
        upstream = pq.ParquetFile

        def opened(path: Path, **kwargs: Any) -> pq.ParquetFile:
            self.num_checked += 1
            if self.fails:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return upstream(path, **kwargs)

        monkeypatch.setattr(pq, "ParquetFile", opened)


def test_a_read_that_fails_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as no damage; rows that were read before stay."""
    write(tmp_path, 0)
    record, disk = Record(tmp_path), Disk(monkeypatch)
    record.refresh()
    write(tmp_path, 1)
    disk.fails = True
    assert not any(record.refresh() for _ in range(2))
    assert steps_of(record) == [0]
    [message] = caplog.messages
    assert "cannot be read ([Errno 116] Stale file" in message
    disk.fails = False
    assert record.refresh()
    assert steps_of(record) == [0, 1]


def test_a_poll_costs_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, disk = Record(tmp_path), Disk(monkeypatch)
    for steps, num_new in ((range(20), 20), (range(20, 21), 1), (range(0), 0)):
        write(tmp_path, *steps)
        disk.num_checked = 0
        assert record.refresh() == bool(num_new)
        assert disk.num_checked == num_new
    for path in files_of(tmp_path)[:5]:  # as a bounded record does
        path.unlink()
    assert steps_of(record) == [*range(5, 21)]  # a query looks for files that have gone
    assert not record.refresh()
