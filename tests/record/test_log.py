"""The sample log: what is appended is what is read, also from a file that was cut off."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_grpo_ext.record import log as sample_log
from swift_grpo_ext.record.log import SAMPLES, SampleLog, next_session
from swift_grpo_ext.record.reader import index_samples, read_samples
from swift_grpo_ext.record.row import SAMPLE_ID_COLUMNS, SCHEMA, SampleRow, to_batch, to_rows
from swift_grpo_ext.sampling.seeding import SampleId
from tests.record.rows import ROW, sample_id, write_session


def kept(logprob: float) -> float:
    return float(np.float16(np.rint(logprob * 1024) / 1024 if logprob > -1 else logprob))


def read_rows(run_dir: Path) -> list[SampleRow]:
    return to_rows(read_samples(run_dir))


@pytest.mark.parametrize(
    "change",
    [
        {
            "text": "数字是七 👍🏽 \0 é",
            "prompt": "哪个数字？",
            "media": ["图/七.png", "https://x/7?a=1"],
        },
        {"token_ids": [], "logprobs": [], "text": "", "finish_reason": None},
        {"logprobs": None},
        {"seed": None},
        {"seed": 2**63 - 1},
        {"seed": 2**62 + 2**14},
        {"media": [], "prompt": "", "replica": ""},
        {"finish_reason": "length", "rank": 63, "weight_version": 10**6},
        {"sample_id": sample_id(10**9, "eval", 7, 10**6, 2**14 - 1, 5)},
        {"logprobs": [-float("inf"), -1e-30, -87.0]},
    ],
)
def test_a_row_comes_back_as_it_was(tmp_path: Path, change: dict[str, Any]) -> None:
    row = replace(ROW, **change)
    write_session(tmp_path, [row])
    [read] = read_rows(tmp_path)
    expected = [kept(p) for p in row.logprobs] if row.logprobs is not None else None
    assert read == replace(row, logprobs=expected)
    assert read_samples(tmp_path, columns=["num_tokens"])["num_tokens"][0].as_py() == len(
        row.token_ids
    )


def test_how_exact_log_probabilities_are(tmp_path: Path) -> None:
    exact = -np.random.default_rng(0).exponential(2.0, 3000)
    row = replace(ROW, token_ids=[1] * 3000, logprobs=exact.tolist())
    write_session(tmp_path, [row])
    read = np.array(read_rows(tmp_path)[0].logprobs)
    error = np.abs(read - exact)
    assert (error <= np.maximum(0.0005, 0.0005 * np.abs(exact))).all()
    assert error.max() > 0.0004


def test_what_must_be_known_of_a_sample() -> None:
    nullable = {field.name for field in SCHEMA if field.nullable}
    assert nullable == {"seed", "finish_reason", "stop_reason", "logprobs"}


def test_arrays_are_as_good_as_lists(tmp_path: Path) -> None:
    ids = np.array(ROW.token_ids)
    write_session(tmp_path, [replace(ROW, token_ids=ids, logprobs=np.array(ROW.logprobs))])
    assert read_rows(tmp_path) == [ROW]


def test_lone_surrogates_are_kept_as_escapes(tmp_path: Path) -> None:
    write_session(tmp_path, [ROW, replace(ROW, text="7\ud83d", media=["\udcff.png"])])
    assert read_rows(tmp_path) == [ROW, replace(ROW, text="7\\ud83d", media=["\\udcff.png"])]


TEXTS = st.text(max_size=20)
ROWS = st.builds(
    replace,
    st.just(ROW),
    sample_id=st.builds(
        SampleId,
        phase=st.sampled_from(["train", "eval"]),
        step=st.integers(0, 3),
        number=st.integers(0, 2),
        group=st.integers(0, 3),
        index=st.integers(0, 3),
        turn=st.integers(0, 2),
    ),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    rank=st.integers(0, 2**31 - 1),
    replica=TEXTS,
    weight_version=st.integers(0, 2**63 - 1),
    finish_reason=st.none() | TEXTS,
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5),
    logprobs=st.none(),
    text=TEXTS,
    fingerprint=TEXTS,
    prompt=TEXTS,
    media=st.lists(TEXTS, max_size=3),
)
LOGPROBS = st.lists(st.integers(-(2**11), 0).map(lambda i: i / 1024), min_size=5, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(ROWS, st.none() | LOGPROBS), max_size=12),
    num_ranks=st.integers(1, 3),
    num_flushes=st.integers(1, 3),
)
def test_every_row_comes_back_sorted(
    rows: list[tuple[SampleRow, list[float] | None]], num_ranks: int, num_flushes: int
) -> None:
    """However rows are spread over ranks and flushes."""
    written = [
        row if logprobs is None else replace(row, logprobs=logprobs[: len(row.token_ids)])
        for row, logprobs in rows
    ]
    written = list({row.sample_id: row for row in written}.values())
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            own = written[rank::num_ranks]
            with SampleLog(folder, session=0, start_step=0, rank=rank) as log:
                for flush in range(num_flushes):
                    log.append(own[flush::num_flushes])
        read = read_rows(Path(folder))
    assert read == sorted(written, key=lambda row: row.sample_id)


def test_more_rows_than_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "ROWS_PER_BATCH", 4)
    rows = [replace(ROW, sample_id=sample_id(group=i)) for i in range(10)]
    write_session(tmp_path, rows)
    [batches] = index_samples(tmp_path).rounds.values()
    assert [batch.num_rows for batch in batches] == [4, 4, 2]
    assert read_rows(tmp_path) == rows


def test_columns_keep_the_order_of_the_call(tmp_path: Path) -> None:
    write_session(tmp_path, [ROW])
    table = read_samples(tmp_path, columns=["text", "step"])
    assert table.to_pylist() == [{"text": "seven", "step": 0}]
    assert table.schema.metadata is None
    with pytest.raises(ValueError, match=r"No columns \['reward'\] of samples; there are"):
        read_samples(tmp_path, columns=["step", "reward"])


def test_what_is_appended_can_be_read_at_once(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0)
    assert read_samples(tmp_path).num_rows == 0
    assert read_samples(tmp_path).schema == SCHEMA
    log.append([])
    assert not log.path.exists()
    for step in range(3):
        log.append([replace(ROW, sample_id=sample_id(step))])
        assert read_samples(tmp_path).num_rows == step + 1
    log.close()
    log.close()
    assert read_samples(tmp_path).num_rows == 3
    with pytest.raises(ValueError, match="is closed"):
        log.append([ROW])


def test_other_arrow_readers_read_the_file(tmp_path: Path) -> None:
    path = write_session(
        tmp_path, [ROW, replace(ROW, sample_id=sample_id(1))], session=2, start_step=1
    )
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert table["step"].to_pylist() == [0, 1]
    assert {k: v for k, v in table.schema.metadata.items() if k != b"crc32"} == {
        b"version": b"3",
        b"session": b"2",
        b"start_step": b"1",
        b"rank": b"0",
    }


def test_cut_off_anywhere(tmp_path: Path) -> None:
    """Every batch that is whole is read, and nothing else."""
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0)
    rows, ends = [], []
    for step in range(3):
        rows.append(replace(ROW, sample_id=sample_id(step), seed=step, token_ids=[step] * 3))
        log.append(rows[-1:])
        ends.append(log.path.stat().st_size)
    log.close()
    whole = log.path.read_bytes()
    assert ends[-1] < len(whole)  # the mark of the end follows
    # Each byte about the ends of batches; 7 leads through every place of Arrow's blocks of 8 bytes.
    near = {end + i for end in (0, *ends, len(whole)) for i in range(-24, 25)}
    for size in sorted({*near, *range(0, len(whole), 7)} & set(range(len(whole) + 1))):
        log.path.write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends)
        index = index_samples(tmp_path)
        assert index.num_rows == num_whole
        [unread] = [session.num_unread_bytes for session in index.sessions] or [size]
        last_end = ends[num_whole - 1] if num_whole else size - unread
        assert unread == (0 if size == len(whole) else size - last_end)
        if size % 16 == 0 or size in ends:
            assert read_rows(tmp_path) == rows[:num_whole]


def damaged(path: Path, start: int, end: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[start:end] = b"\xff" * len(data[start:end])
    path.write_bytes(data)


def three_batches(tmp_path: Path) -> tuple[Path, list[SampleRow], list[int]]:
    """A file of 2 rows a step, its rows, and where its batches end."""
    rows = [
        replace(ROW, sample_id=sample_id(step, index=i), seed=77, text=f"{step}{i}" * 100)
        for step in range(3)
        for i in range(2)
    ]
    ends = []
    with SampleLog(tmp_path, session=0, start_step=0, rank=0) as log:
        for step in range(3):
            log.append(rows[2 * step : 2 * step + 2])
            ends.append(log.path.stat().st_size)
    return log.path, rows, ends


def test_a_damaged_batch_is_named_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, rows, ends = three_batches(tmp_path)
    damaged(path, ends[1] - 300, ends[1])
    assert read_rows(tmp_path) == rows[:2] + rows[4:]
    [message] = caplog.messages
    assert message.startswith(f"{path} is damaged in rows 2 to 3 (train round 1.0; ")
    assert "the others read. Restore it from a copy." in message


def test_a_batch_without_its_head_is_named_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, rows, ends = three_batches(tmp_path)
    damaged(path, ends[0], ends[0] + 32)
    assert read_rows(tmp_path) == rows[:2] + rows[4:]
    assert caplog.messages == [
        f"{path} is damaged in bytes {ends[0]} to {ends[1]}, behind row 2: these rows are left "
        "out, and the others read. Restore it from a copy."
    ]
    [session] = index_samples(tmp_path).sessions
    assert (session.num_rows, session.num_unread_bytes) == (4, 0)


def test_a_damaged_end_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, rows, ends = three_batches(tmp_path)
    damaged(path, ends[1], ends[1] + 32)
    assert read_rows(tmp_path) == rows[:4]
    num_bytes = path.stat().st_size - ends[1]
    assert caplog.messages == [
        f"{path} is not whole from byte {ends[1]} on, behind row 4: its writer was killed, still "
        f"writes, or {num_bytes} bytes are damaged. They are left out."
    ]


def test_a_file_without_its_head_is_named_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _, _ = three_batches(tmp_path)
    other = replace(ROW, sample_id=sample_id(0, group=1), rank=1)
    write_session(tmp_path, [other], rank=1)
    damaged(path, 8, 40)
    assert read_rows(tmp_path) == [other]
    assert caplog.messages == [
        f"{path} is damaged in its first bytes: none of its rows can be read, restore it from a "
        "copy."
    ]


def test_no_row_is_missing_or_changed_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever bit is flipped."""
    path, rows, ends = three_batches(tmp_path)
    whole = path.read_bytes()
    heads = [start + i for start in (0, *ends[:2]) for i in range(0, 40, 3)]
    for position in [*heads, *range(1, len(whole), 67)]:
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        caplog.clear()
        read = read_rows(tmp_path)
        assert [row for row in rows if row in read] == read, position
        assert len(read) == len(rows) or caplog.messages, position
        assert len(read) >= 4 or position < ends[0]


def test_a_changed_value_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One bit of a column that is read; other columns of these rows can be read."""
    path, rows, _ = three_batches(tmp_path)
    data = path.read_bytes()
    seeds = (b"M" + bytes(7)) * 2
    assert data.count(seeds) == 3
    position = data.index(seeds, data.index(seeds) + 1)
    path.write_bytes(data[:position] + b"\5" + data[position + 1 :])
    assert read_rows(tmp_path) == rows[:2] + rows[4:]
    assert caplog.messages == [
        f"{path} is damaged in rows 2 to 3 (train round 1.0; the checksum of seed is another): "
        "these rows are left out, and the others read. Restore it from a copy."
    ]
    assert read_samples(tmp_path, columns=["text"]).num_rows == 6


def test_a_changed_session_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would supersede other rounds."""
    write_session(tmp_path, [replace(ROW, sample_id=sample_id(step)) for step in range(3)])
    resumed = replace(ROW, sample_id=sample_id(3))
    path = write_session(tmp_path, [resumed], session=1, start_step=3)
    data = path.read_bytes()
    position = data.index(b"3", data.index(b"start_step") + 10)
    path.write_bytes(data[:position] + b"1" + data[position + 1 :])
    assert [row.sample_id.step for row in read_rows(tmp_path)] == [0, 1, 2]
    assert f"{path} is damaged in its first bytes" in caplog.text


def test_bytes_that_are_no_text_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def to_bad_batch(rows: list[SampleRow], schema: pa.Schema) -> pa.RecordBatch:
        batch = to_batch(rows, schema)
        [_, offsets, data] = batch["text"].buffers()
        bad = pa.StringArray.from_buffers(len(rows), offsets, pa.py_buffer(b"\xff" * data.size))
        return batch.set_column(schema.get_field_index("text"), schema.field("text"), bad)

    monkeypatch.setattr(sample_log, "to_batch", to_bad_batch)
    write_session(tmp_path, [ROW])
    assert read_samples(tmp_path, columns=["text"]).num_rows == 0
    assert "is damaged in rows 0 to 0 (train round 0.0; " in caplog.text
    assert "Invalid UTF8" in caplog.text
    assert read_samples(tmp_path, columns=["step"]).num_rows == 1


def test_another_version_is_refused(tmp_path: Path) -> None:
    table = replace(SAMPLES, version=9)
    with SampleLog(tmp_path, session=0, start_step=0, rank=0, table=table) as log:
        log.append([ROW])
    with pytest.raises(ValueError, match=r"is of version 9 .* reads 2, 3: use the version"):
        read_samples(tmp_path)


def test_files_of_an_older_version_are_read(tmp_path: Path) -> None:
    """With log-probabilities in 32 bits, and without checksums; beside files of this version."""
    exact = replace(ROW, logprobs=[float(np.float32(p)) for p in (-0.1, -0.2, -1e-20)])
    older = replace(SAMPLES, version=2, stored=SCHEMA)
    with SampleLog(tmp_path, session=0, start_step=0, rank=0, table=older) as log:
        log.append([exact])
    table = pa.ipc.open_stream(log.path.read_bytes()).read_all()
    metadata = {k: v for k, v in table.schema.metadata.items() if k != b"crc32"}
    table = table.replace_schema_metadata(metadata)
    with pa.ipc.new_stream(str(log.path), table.schema) as stream:
        stream.write_table(table)
    newer = replace(ROW, sample_id=sample_id(1))
    write_session(tmp_path, [newer], rank=1)
    assert read_rows(tmp_path) == [exact, newer]
    assert read_samples(tmp_path).schema == SCHEMA


def test_a_bounded_log_loses_its_oldest_rounds(tmp_path: Path) -> None:
    def rows_of(step: int) -> list[SampleRow]:
        noise = np.random.default_rng(step)
        ids = [noise.integers(0, 2**31, 100) for _ in range(20)]
        return [
            replace(ROW, sample_id=sample_id(step, index=i), token_ids=t, logprobs=None)
            for i, t in enumerate(ids)
        ]

    write_session(tmp_path, rows_of(0))
    write_session(tmp_path, rows_of(0), rank=1)
    of_round = (tmp_path / "samples/session-0000-rank-00000.arrows").stat().st_size
    log = SampleLog(tmp_path, session=1, start_step=1, rank=0, max_bytes=10 * of_round)
    for step in range(1, 31):
        log.append(rows_of(step))
        own = list((tmp_path / "samples").glob("*rank-00000*"))
        assert sum(path.stat().st_size for path in own) <= 10 * of_round
    log.close()
    kept = read_samples(tmp_path, columns=["step", "index"])
    steps = sorted(set(kept["step"].to_pylist()))
    assert steps[0] == 0  # of the other rank
    assert steps[1:] == list(range(steps[1], 31))
    assert 7 <= len(steps[1:]) <= 10
    assert kept.num_rows == 20 * len(steps)
    assert next_session(tmp_path) == 2


def test_a_bound_below_a_round_keeps_the_last_one(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0, max_bytes=1)
    for step in range(3):
        log.append([replace(ROW, sample_id=sample_id(step))])
    assert [row.sample_id.step for row in read_rows(tmp_path)] == [2]


def test_a_file_that_goes_away_while_it_is_read(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_session(tmp_path, [replace(ROW, rank=rank, sample_id=sample_id(rank))], rank=rank)
    index = index_samples(tmp_path)
    (tmp_path / "samples/session-0000-rank-00000.arrows").unlink()
    assert index.read(["step"])["step"].to_pylist() == [1]


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"samples does not exist: .* no output folder"):
        read_samples(tmp_path)


def test_session_numbers(tmp_path: Path) -> None:
    assert next_session(tmp_path) == 0
    SampleLog(tmp_path, session=0, start_step=0, rank=0).close()
    assert next_session(tmp_path) == 0  # no rows, no file
    write_session(tmp_path, [ROW], session=0, rank=3)
    assert next_session(tmp_path) == 1
    write_session(tmp_path, [ROW], session=12345)
    (tmp_path / "samples" / "session-99999-rank-0.txt").touch()
    assert next_session(tmp_path) == 12346


# --- what does not fit ---


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"logprobs": [-1.0]}, "3 tokens and 1 log-probabilities"),
        ({"seed": 2**63}, "seed 9223372036854775808 does not fit int64"),
        ({"token_ids": [2**31, 1, 2]}, r"token_ids \[2147483648, 1, 2\] does not fit list<"),
        ({"token_ids": [None, 1, 2]}, "token_ids .* does not fit .*None is not allowed"),
        ({"text": None}, "text None does not fit string .None is not allowed"),
        ({"text": 7}, "text 7 does not fit string"),
        ({"rank": None}, "rank None does not fit"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    bad = replace(ROW, sample_id=sample_id(3, index=5), **change)
    with SampleLog(tmp_path, session=0, start_step=0, rank=0) as log:
        with pytest.raises(ValueError, match=f"train round 3.0, group 0, sample 5: {match}"):
            log.append([ROW, replace(ROW, text="\ud800"), bad])
        assert not log.path.exists()
        log.append([ROW])
    assert read_rows(tmp_path) == [ROW]


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    write_session(tmp_path, [ROW])
    with pytest.raises(FileExistsError, match=r"00000\.arrows exists already: .*`next_session`"):
        write_session(tmp_path, [replace(ROW, seed=2)])
    assert read_rows(tmp_path) == [ROW]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"00000\.arrows cannot be written .*--output_dir"):
        SampleLog(tmp_path / "file", session=0, start_step=0, rank=0)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_no_room(tmp_path: Path) -> None:
    """The write stops midway, as on a full disk. What was on disk before stays readable."""
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0)
    log.append([ROW])
    size = log.path.stat().st_size
    with file_size_limit(size + 100), pytest.raises(OSError, match="make room there") as failed:
        log.append([replace(ROW, sample_id=sample_id(1))])
    assert failed.value.errno == errno.EFBIG
    assert str(log.path) in str(failed.value)
    with pytest.raises(ValueError, match="is closed"):
        log.append([replace(ROW, sample_id=sample_id(1))])
    log.close()
    assert log.path.stat().st_size == size + 100
    assert read_rows(tmp_path) == [ROW]


def test_a_killed_writer_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from tests.record.rows import *\n"
        "log = SampleLog(sys.argv[1], session=0, start_step=0, rank=0)\n"
        "log.append([ROW])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, check=False)
    assert killed.returncode == -9
    assert read_rows(tmp_path) == [ROW]


def test_imports_neither_torch_nor_vllm_nor_swift() -> None:
    program = (
        "import sys, swift_grpo_ext.record.reader, swift_grpo_ext.tools.export\n"
        "assert not {'torch', 'vllm', 'swift', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_are_read_without_the_tokens(tmp_path: Path) -> None:
    """Measured in CPU time, which a busy machine does not stretch."""
    tokens = list(range(2000))
    rows = [
        replace(
            ROW, sample_id=sample_id(step, group=group), token_ids=tokens, logprobs=[-0.5] * 2000
        )
        for step in range(20)
        for group in range(100)
    ]
    write_session(tmp_path, rows)
    sample_ids, everything = (
        min(timeit.repeat(partial(read_samples, tmp_path, columns=columns), process_time, number=1))
        for columns in (SAMPLE_ID_COLUMNS, SCHEMA.names)
    )
    assert sample_ids * 2 < everything
