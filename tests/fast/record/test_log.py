"""The record is Parquet in few small files. It is bounded, waits for a disk that fails (V1), and is
read while its run goes on (V2)."""

import errno
import os
import random
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.record import log as sample_log
from swift_grpo_ext.record.log import SampleLog, next_session, record_files
from swift_grpo_ext.record.query import Record, read_samples
from swift_grpo_ext.record.tables import REWARDS, SAMPLES
from tests.rig.record.rows import (
    ROW,
    open_log,
    read_rows,
    row_of,
    sample_id,
    score_of,
    write_session,
)


def steps_of(run_dir: Path) -> list[int]:
    return read_samples(run_dir, columns=["step"])["step"].to_pylist()


def write_steps(log: SampleLog, *steps: int, **changes: Any) -> None:
    """Append a row for each step, each in its own file, and wait until files are merged."""
    for step in steps:
        log.append([row_of(sample_id(step), **changes)])
    log.flush()
    log.writer.submit(int).result()


def tokens_of(number: int) -> dict[str, Any]:
    """Return tokens that do not compress."""
    ids = np.random.default_rng(0).integers(0, 2**31, number)
    return {"token_ids": ids, "logprobs": None}


def names_of(run_dir: Path) -> list[str]:
    """Return the part of files' names after the session's step."""
    paths = sorted(SAMPLES.folder(run_dir).glob("*.parquet"))
    return [path.stem.partition("step-")[2].partition("-")[2] for path in paths]


# --- what is in a file ---


def test_any_parquet_reader_reads_the_files(tmp_path: Path) -> None:
    """An unfinished file is ignored. A call without rows makes no file, and so no session."""
    with pytest.raises(FileNotFoundError, match=r"has no samples: no round .* yet, or"):
        read_samples(tmp_path)
    open_log(tmp_path).append([])
    open_log(tmp_path).flush()
    assert next_session(tmp_path) == 0
    SAMPLES.folder(tmp_path).mkdir()
    assert read_samples(tmp_path).schema == SAMPLES.schema
    path = write_session(tmp_path, [ROW], session=12345)
    assert next_session(tmp_path) == 12346
    (tmp_path / "samples/.unfinished.tmp").write_bytes(b"PAR1")
    [row] = pandas.read_parquet(tmp_path / "samples").to_dict("records")
    assert (row["session"], row["step"], row["logprobs"].tolist()) == (12345, 0, ROW.logprobs)
    row_group = pq.read_metadata(path).row_group(0)
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "BYTE_STREAM_SPLIT" in encodings["logprobs.list.element"]
    assert "RLE_DICTIONARY" in encodings["media.list.element"]
    assert "RLE_DICTIONARY" not in encodings["seed"]
    table = read_samples(tmp_path, columns=["num_tokens", "step"])
    assert table.to_pylist() == [{"num_tokens": 3, "step": 0}]
    with pytest.raises(KeyError, match="reward"):
        read_samples(tmp_path, columns=["step", "reward"])


@pytest.mark.parametrize(("num_samples", "most_bytes"), [(64, 135), (1024, 40)])  # V1's bounds
def test_what_a_sample_takes_beside_its_tokens(
    tmp_path: Path, num_samples: int, most_bytes: int
) -> None:
    """Seeds and scores do not compress."""
    rng, log = np.random.default_rng(0), open_log(tmp_path)
    for step in range(4):
        names = [sample_id(step, group=n // 8, index=n % 8) for n in range(num_samples)]
        log.append([replace(ROW, sample_id=n, seed=int(rng.integers(2**62))) for n in names])
        scores = [
            score_of(name, a, rewards=[("Accuracy", b)], advantage=c, gap_mean=d, gap_max=e)
            for name, (a, b, c, d, e) in zip(names, rng.random((num_samples, 5)), strict=True)
        ]
        log.append(scores, REWARDS)
    log.flush()
    assert size_of(tmp_path) / num_samples / 4 <= most_bytes


def size_of(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())


# --- files over time ---


def test_a_round_is_a_file_and_small_ones_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "FILES", 3)
    monkeypatch.setattr(sample_log, "FILE_BYTES", 50_000)
    log = open_log(tmp_path)
    write_steps(log, 0, 1)
    # One call with two rounds, and one with another phase.
    log.append([row_of(sample_id(step)) for step in (2, 3)])
    log.append([row_of(sample_id(4, "eval"))])
    write_steps(log)  # which waits
    single = ["file-000003-train-000003-00", "file-000004-eval-000004-00"]
    assert names_of(tmp_path) == [*single, "files-000000-000002"]
    write_steps(log, 5, **tokens_of(20_000))
    write_steps(log, 6, 7)
    log.finish()
    merged = ["files-000000-000002", "files-000003-000004", "files-000006-000007"]
    assert names_of(tmp_path) == ["file-000005-train-000005-00", *merged]
    assert steps_of(tmp_path) == [4, 0, 1, 2, 3, 5, 6, 7]


def test_a_bound_removes_the_oldest_and_no_more_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound includes earlier sessions. A reader that read before looks for files that have
    gone. `test_history.py` has scores, and sessions that fail."""
    monkeypatch.setattr(sample_log, "LARGE", 1)  # some files are merged
    tokens, max_bytes = tokens_of(2000), 250_000
    write_steps(open_log(tmp_path), *range(32), **tokens)
    before = Record(tmp_path)
    before.refresh()
    log = open_log(tmp_path, session=1, start_step=32, max_bytes=max_bytes)
    for step in range(32, 44):
        write_steps(log, step, **tokens)
        assert 0.7 * max_bytes < size_of(tmp_path) <= max_bytes
    steps = steps_of(tmp_path)
    assert steps == list(range(steps[0], 44))
    found = before.rows("select distinct step, map(['a'], [1]) as named from samples order by step")
    assert found == [{"step": step, "named": {"a": 1}} for step in steps]


def test_a_step_does_not_wait_for_the_disk_and_a_bad_row_is_an_error(tmp_path: Path) -> None:
    log, may_write = open_log(tmp_path), threading.Event()
    bad = row_of(sample_id(3, index=5), token_ids=[1, 2, 3], logprobs=[-1.0])
    counts = "train round 3.0, group 0, sample 5: 3 tokens and 1 log-probabilities"
    with pytest.raises(ValueError, match=counts):
        log.append([ROW, bad])
    log.writer.submit(may_write.wait, 10)  # a disk that is slow
    log.append([ROW])
    assert record_files(SAMPLES.folder(tmp_path)) == []
    may_write.set()
    log.flush()
    assert read_rows(tmp_path) == [ROW]


def test_rounds_wait_for_a_full_disk_up_to_a_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier rounds stay readable. Later ones are written in their order, without the oldest."""

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sample_log, "WAITING_BYTES", 1 << 20)
    log = open_log(tmp_path)
    write_steps(log, 0)
    with monkeypatch.context() as disk:
        disk.setattr(sample_log, "_write_file", fail)
        write_steps(log, *range(1, 7), text="7" * (300 << 10))
        assert steps_of(tmp_path) == [0]
    [message] = caplog.messages
    for words in (str(tmp_path), "No space left", "Beyond 1 MiB the oldest are lost", "Make room"):
        assert words in message
    write_steps(log, 7)
    names = [f"file-{n:06d}-train-{step:06d}-00" for n, step in enumerate((0, 4, 5, 6, 7))]
    assert names_of(tmp_path) == names
    with monkeypatch.context() as disk:
        disk.setattr(sample_log, "_write_file", fail)
        write_steps(log, 8)
    log.finish()
    assert steps_of(tmp_path) == [0, 4, 5, 6, 7, 8]
    assert caplog.messages[-1].startswith("3 rounds of the run's record are lost")


# --- damage, and a poll ---


def test_flipped_bits_are_named_or_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DuckDB alone would read other values for most; pyarrow reads some headers that DuckDB
    cannot."""
    path = write_session(tmp_path, [row := row_of(sample_id())])
    sound, rng, num_named = path.read_bytes(), random.Random(0), 0
    for _ in range(30):
        flipped = bytearray(sound)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        caplog.clear()
        if rows := read_rows(tmp_path):
            assert rows == [row]
        else:
            assert f"{path} cannot be read (" in caplog.text
            num_named += 1
    assert num_named > 15


@pytest.mark.parametrize(
    ("column", "wrong"),
    [
        ("mask", []),
        ("phase", [None]),
        ("logprobs", [[-1.0] * 9]),
        ("token_ids", [[1] * 9]),
        ("", []),
    ],
)
def test_a_damaged_file_is_named_once_never_merged_and_read_when_it_is_restored(
    column: str, wrong: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(tmp_path)
    write_steps(log, 0, 1, 2)
    path = record_files(SAMPLES.folder(tmp_path))[1].path
    sound, rows = path.read_bytes(), pq.read_table(path)
    rows = rows.drop_columns([column]) if column else rows.slice(0, 0)
    rows = rows.append_column(column, [wrong]) if wrong else rows
    pq.write_table(rows, path)
    record = Record(tmp_path)
    assert [record.refresh() for _ in range(2)] == [True, False]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pq, "ParquetFile", None)  # it is not opened again
        assert not record.refresh()
    assert record.table("select step from samples order by step")["step"].to_pylist() == [0, 2]
    [message] = caplog.messages
    expected = rf"{path} cannot be read \(.{{9}}.*rows are left out.*restore it"
    assert re.match(expected, message, re.S)
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):  # one warning is enough
        log.finish()
    assert "files of the run's record cannot be merged or removed (" in caplog.messages[-1]
    path.write_bytes(sound)
    assert record.refresh()
    assert len(caplog.messages) == 2
    assert steps_of(tmp_path) == [0, 1, 2]


def test_a_poll_reads_what_is_new_and_tries_again_what_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server's failure counts as no damage; rows that were read before stay. The file of
    scores is removed meanwhile, which is no failure."""
    upstream, opened, fails = pq.ParquetFile, list[Path](), False

    def file(path: Path, **options: Any) -> pq.ParquetFile:
        opened.append(path)
        if fails:
            path.unlink() if path.parent.name == "rewards" else None
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return upstream(path, **options)

    monkeypatch.setattr(pq, "ParquetFile", file)
    record, log = Record(tmp_path), open_log(tmp_path)
    for steps, num_new in ((range(5), 5), (range(5, 6), 1), (range(0), 0)):
        write_steps(log, *steps)
        opened.clear()
        assert record.refresh() == bool(num_new)
        assert len(opened) == num_new
    write_steps(log, 6)
    log.append([score_of(sample_id(6))], REWARDS)
    log.flush()
    fails = True
    assert [record.refresh() for _ in range(2)] == [False, False]
    assert [name.step for name in record.rounds()] == [5, 4, 3, 2, 1, 0]
    [message] = caplog.messages
    assert "cannot be read ([Errno 116] Stale file" in message
    fails = False
    assert record.refresh()
    assert [name.step for name in record.rounds()] == [6, 5, 4, 3, 2, 1, 0]
