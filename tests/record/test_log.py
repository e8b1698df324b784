"""The record: what is appended is what is read, in few files, also where some are damaged."""

from __future__ import annotations

import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.record import log as sample_log
from swift_grpo_ext.record.log import SampleLog, record_files
from swift_grpo_ext.record.reader import index_samples, read_samples
from swift_grpo_ext.record.row import SAMPLE_ID_COLUMNS, SAMPLES, SampleRow, make_table, to_rows
from swift_grpo_ext.record.session import next_session
from tests.record.rows import ROW, sample_id, write_session


def read_rows(run_dir: Path) -> list[SampleRow]:
    return to_rows(read_samples(run_dir))


def open_log(run_dir: Path, **options: Any) -> SampleLog:
    return SampleLog(run_dir, **{"session": 0, "start_step": 0, "rank": 0, **options})


def write_steps(log: SampleLog, *steps: int, **changes: Any) -> None:
    """Append a row for each step, each in a file of its own."""
    for step in steps:
        log.append([replace(ROW, sample_id=sample_id(step), **changes)])
        log.flush()


def steps_of(run_dir: Path) -> list[int]:
    return read_samples(run_dir, columns=["step"])["step"].to_pylist()


@pytest.mark.parametrize(
    "change",
    [
        {"text": "数字是七 👍🏽 \0 é", "prompt": "哪个数字？", "media": ["图/七.png", "a?b=1"]},
        {"token_ids": [], "logprobs": [], "text": "", "media": [], "finish_reason": None},
        {"logprobs": None, "seed": None, "rank": 63, "stop_reason": "</a>"},
        {"seed": 2**63 - 1, "sample_id": sample_id(10**9, "eval", number=7, group=10**6, turn=5)},
        {"logprobs": [-float("inf"), -65504.0, -87.0], "weight_version": 10**6},
    ],
)
def test_a_row_comes_back_as_it_was(tmp_path: Path, change: dict[str, Any]) -> None:
    row = replace(ROW, **change)
    write_session(tmp_path, [row])
    assert read_rows(tmp_path) == [row]
    counts = read_samples(tmp_path, columns=["num_tokens"])["num_tokens"].to_pylist()
    assert counts == [len(row.token_ids)]


def test_a_table_s_columns() -> None:
    table = make_table("extra", {"text": pa.utf8(), "size": pa.int32()}, nullable=["text"])
    *named, text, size = table.schema
    assert [field.name for field in named] == ["session", *SAMPLE_ID_COLUMNS[:-1]]
    assert text == pa.field("text", pa.utf8(), nullable=True)
    assert size == pa.field("size", pa.int32(), nullable=False)


def test_how_exact_log_probabilities_are(tmp_path: Path) -> None:
    exact = -np.random.default_rng(0).exponential(2.0, 3000)
    write_session(tmp_path, [replace(ROW, token_ids=[1] * 3000, logprobs=exact.tolist())])
    error = np.abs(np.array(read_rows(tmp_path)[0].logprobs) - exact)
    assert (error <= np.maximum(0.0005, 0.0005 * np.abs(exact))).all()
    assert error.max() > 0.0004
    write_session(tmp_path, [replace(ROW, logprobs=[-1e30, -1.0, -1e-30])], session=1)
    assert read_rows(tmp_path)[0].logprobs == [-float("inf"), -1.0, 0.0]


def test_any_parquet_reader_reads_the_files_and_ours_keeps_the_order(tmp_path: Path) -> None:
    write_session(tmp_path, [replace(ROW, sample_id=sample_id(1))], session=2, start_step=1)
    (tmp_path / "samples/.unfinished.tmp").write_bytes(b"PAR1")
    [row] = pandas.read_parquet(tmp_path / "samples").to_dict("records")
    assert (row["session"], row["step"], row["logprobs"].tolist()) == (2, 1, ROW.logprobs)
    assert read_samples(tmp_path).schema == SAMPLES.schema
    [file] = record_files(SAMPLES.folder(tmp_path))
    row_group = pq.read_metadata(file.path).row_group(0)
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "BYTE_STREAM_SPLIT" in encodings["logprobs.list.element"]
    assert "RLE_DICTIONARY" in encodings["media.list.element"]
    assert "RLE_DICTIONARY" not in encodings["seed"]
    table = read_samples(tmp_path, columns=["text", "step"])
    assert table.to_pylist() == [{"text": "seven", "step": 1}]
    with pytest.raises(KeyError, match="reward"):
        read_samples(tmp_path, columns=["step", "reward"])


def test_sessions_and_folders_without_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"samples does not exist: .* no output folder"):
        read_samples(tmp_path)
    open_log(tmp_path).append([])
    open_log(tmp_path).flush()
    assert next_session(tmp_path) == 0  # no rows, no file
    SAMPLES.folder(tmp_path).mkdir()
    assert read_samples(tmp_path).schema == SAMPLES.schema
    assert read_samples(tmp_path, columns=["step"]).schema.names == ["step"]
    write_session(tmp_path, [ROW], session=12345, rank=3)
    (tmp_path / "samples/session-99999-rank-0.parquet").touch()
    assert next_session(tmp_path) == 12346


def test_the_step_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    log, may_write = open_log(tmp_path), threading.Event()
    log._writer.submit(may_write.wait, 10)  # a disk that is slow
    log.append([ROW])
    assert [thread.name for thread in log._writer._threads] == ["sample-log_0"]
    assert record_files(SAMPLES.folder(tmp_path)) == []
    may_write.set()
    log.flush()
    assert read_rows(tmp_path) == [ROW]


def test_rounds_join_the_newest_file_until_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes for a reader, also for one that looked before."""
    monkeypatch.setattr(sample_log, "ROUNDS_PER_FILE", 3)
    log = open_log(tmp_path)
    monkeypatch.setattr(log, "_file_bytes", 50_000)
    write_steps(open_log(tmp_path, rank=1), 0, 1)
    write_steps(log, 0, 1)
    before = index_samples(tmp_path)
    write_steps(log, 2, 3)
    write_steps(log, 4, text="7" * 60_000)
    log.append([replace(ROW, sample_id=sample_id(step)) for step in (5, 6)])  # one call
    log.flush()
    write_steps(open_log(tmp_path, session=1, start_step=7), 7)
    files = record_files(SAMPLES.folder(tmp_path))
    num_rounds = [pq.read_metadata(f.path).num_row_groups for f in files if f.rank == 0]
    assert num_rounds == [3, 2, 2, 1]
    assert before.read(["step"])["step"].to_pylist() == [0, 0, 1, 1]
    assert steps_of(tmp_path) == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7]


def test_a_bounded_record_loses_its_oldest_rounds(tmp_path: Path) -> None:
    """Those of earlier sessions first, and none of another rank's."""
    ids = np.random.default_rng(0).integers(0, 2**31, 2000)  # which do not compress
    for rank in (0, 1):
        write_steps(open_log(tmp_path, rank=rank), 0, token_ids=ids, logprobs=None)
    size_of_round = record_files(SAMPLES.folder(tmp_path))[0].path.stat().st_size
    before = index_samples(tmp_path)
    log = open_log(tmp_path, session=1, start_step=1, max_bytes=10 * size_of_round)
    for step in range(1, 31):
        write_steps(log, step, token_ids=ids, logprobs=None)
        files = record_files(SAMPLES.folder(tmp_path))
        sizes = [file.path.stat().st_size for file in files if file.rank == 0]
        assert sum(sizes) <= 10 * size_of_round
    steps = sorted(set(steps_of(tmp_path)))
    assert steps[0] == 0  # of the other rank
    assert steps[1:] == list(range(steps[1], 31))
    assert 7 <= len(steps[1:]) <= 10
    write_steps(open_log(tmp_path, session=2, start_step=31, max_bytes=1), 31, 32)
    assert steps_of(tmp_path) == [0, 32]  # the newest file is never removed
    assert before.read(["session"]).num_rows == 1  # of the other rank's file, which is still there


def test_a_bad_row_is_an_error(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([ROW, replace(ROW, sample_id=sample_id(3, index=5), logprobs=[-1.0])])
    counts = "train round 3.0, group 0, sample 5: 3 tokens and 1 log-probabilities"
    with pytest.raises(ValueError, match=counts):
        log.flush()
    log.append([ROW])
    log.flush()
    assert read_rows(tmp_path) == [ROW]


def test_a_full_disk_loses_rounds_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was on disk before stays readable, and what comes after is written."""
    log = open_log(tmp_path)
    write_steps(log, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    write_steps(log, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder = SAMPLES.folder(tmp_path)
    assert caplog.messages == [
        "1 rows of the table samples, from train round 1.0, group 0, sample 0 on, may be missing "
        f"from the run's record: {folder} cannot be written ([Errno 27] File too large). Make "
        "room there, or correct --output_dir. The training goes on."
    ]
    write_steps(log, 2)
    assert steps_of(tmp_path) == [0, 2]
    assert len(list(folder.iterdir())) == 1  # nothing half-written is left


def test_a_damaged_file_is_named_and_left_out_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(tmp_path)
    write_steps(log, 0, 1, 2)
    write_session(tmp_path, [replace(ROW, sample_id=sample_id(3))], rank=1)
    [file, _] = record_files(SAMPLES.folder(tmp_path))
    whole = file.path.read_bytes()
    row_group = pq.read_metadata(file.path).row_group(1)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    [column] = [column for column in columns if column.path_in_schema == "seed"]
    flipped = bytearray(whole)
    flipped[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    rows = pq.read_table(file.path)
    phase = pa.nulls(rows.num_rows, rows.schema.field("phase").type)
    nameless = pa.BufferOutputStream()  # a flipped bit of the footer can take a round's name
    pq.write_table(rows.set_column(1, "phase", phase), nameless)
    bare = pa.BufferOutputStream()
    pq.write_table(rows, bare, write_statistics=False)
    for content in (bytes(flipped), whole[:-1], nameless.getvalue(), bare.getvalue()):
        file.path.write_bytes(content)
        caplog.clear()
        assert [row.sample_id.step for row in read_rows(tmp_path)] == [3]
        [message] = caplog.messages
        beginning, _, cause = message.partition("(")
        assert beginning == f"{file.path} is damaged "
        assert cause.endswith("): its rows are left out. Restore it from a copy.")
        assert len(cause.partition(")")[0]) > len("None")
    file.path.write_bytes(flipped)
    assert len(read_samples(tmp_path, columns=["text"])) == 4  # another column than the damaged
