"""The record is read as it was written; it has few files, a bound, and survives damage."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.record import log as sample_log
from swift_grpo_ext.record.log import SampleLog, claim_session, next_session, record_files
from swift_grpo_ext.record.query import Record, read_rewards, read_samples
from swift_grpo_ext.record.tables import (
    REWARDS,
    SAMPLES,
    RewardRow,
    SampleRow,
    to_rows,
)
from tests.rig.arguments import ROOT
from tests.rig.record.rows import ROW, open_log, row_of, sample_id, write_session


def read_rows(run_dir: Path) -> list[SampleRow]:
    return to_rows(read_samples(run_dir))


def write_steps(log: SampleLog, *steps: int, **changes: Any) -> None:
    """Append a row for each step, each in its own file."""
    for step in steps:
        log.append([row_of(sample_id(step), **changes)])
        log.flush()


def wait(log: SampleLog) -> None:
    """Wait for merging too, as `flush` does not."""
    log.flush()
    log.writer.submit(int).result()


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


def test_how_exact_log_probabilities_are(tmp_path: Path) -> None:
    exact = -np.random.default_rng(0).exponential(2.0, 3000)
    write_session(tmp_path, [replace(ROW, token_ids=[1] * 3000, logprobs=exact.tolist())])
    error = np.abs(np.array(read_rows(tmp_path)[0].logprobs) - exact)
    assert 0.0009 < error.max() <= 0.001
    write_session(tmp_path, [replace(ROW, logprobs=[-(2.0**100), -1.0, -1e-30])], session=1)
    assert read_rows(tmp_path)[0].logprobs == [-(2.0**100), -1.0, 0.0]


def test_any_parquet_reader_reads_the_files_and_ours_keeps_the_order(tmp_path: Path) -> None:
    write_session(tmp_path, [row_of(sample_id(1))], session=2, start_step=1)
    (tmp_path / "samples/.unfinished.tmp").write_bytes(b"PAR1")
    [row] = pandas.read_parquet(tmp_path / "samples").to_dict("records")
    expected = 2, 1, row_of(sample_id(1)).logprobs
    assert (row["session"], row["step"], row["logprobs"].tolist()) == expected
    query = f"SELECT session, step, logprobs FROM '{tmp_path}/samples/*.parquet'"
    assert duckdb.sql(query).fetchall() == [expected]
    assert read_samples(tmp_path).schema == SAMPLES.schema
    [file] = record_files(SAMPLES.folder(tmp_path))
    row_group = pq.read_metadata(file.path).row_group(0)
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "BYTE_STREAM_SPLIT" in encodings["logprobs.list.element"]
    assert "RLE_DICTIONARY" in encodings["media.list.element"]
    assert "RLE_DICTIONARY" not in encodings["seed"]
    table = read_samples(tmp_path, columns=["text", "step"])
    assert table.to_pylist() == [{"text": row_of(sample_id(1)).text, "step": 1}]
    with pytest.raises(KeyError, match="reward"):
        read_samples(tmp_path, columns=["step", "reward"])


def test_sessions_and_folders_without_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no samples: no round .* yet, or"):
        read_samples(tmp_path)
    open_log(tmp_path).append([])
    open_log(tmp_path).flush()
    assert next_session(tmp_path) == 0  # no rows, no file
    SAMPLES.folder(tmp_path).mkdir()
    assert read_samples(tmp_path).schema == SAMPLES.schema
    assert read_samples(tmp_path, columns=["step"]).schema.names == ["step"]
    write_session(tmp_path, [ROW], session=12345)
    assert next_session(tmp_path) == 12346


def test_the_step_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    log, may_write = open_log(tmp_path), threading.Event()
    log.writer.submit(may_write.wait, 10)  # a disk that is slow
    log.append([ROW])
    assert record_files(SAMPLES.folder(tmp_path)) == []
    may_write.set()
    log.flush()
    assert read_rows(tmp_path) == [ROW]


def names_of(run_dir: Path) -> list[str]:
    """Return the part of files' names after the session's step."""
    paths = sorted(SAMPLES.folder(run_dir).glob("*.parquet"))
    return [path.stem.partition("step-")[2].partition("-")[2] for path in paths]


def test_a_round_is_a_file_and_small_ones_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees no change, also one that read before the merge."""
    monkeypatch.setattr(sample_log, "FILES", 3)
    monkeypatch.setattr(sample_log, "FILE_BYTES", 50_000)
    log = open_log(tmp_path)
    write_steps(log, 0, 1)
    assert names_of(tmp_path) == ["file-000000-train-000000-00", "file-000001-train-000001-00"]
    before = Record(tmp_path)
    before.refresh()
    # One call with two rounds, and one with another phase.
    log.append([row_of(sample_id(step)) for step in (2, 3)])
    log.append([row_of(sample_id(4, "eval"))])
    wait(log)
    single = ["file-000003-train-000003-00", "file-000004-eval-000004-00"]
    assert names_of(tmp_path) == [*single, "files-000000-000002"]
    found = before.rows("select step from samples order by step")
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4]  # it looks for files that have gone
    assert steps_of(tmp_path) == [4, 0, 1, 2, 3]
    write_steps(
        log, 5, token_ids=np.random.default_rng(0).integers(0, 2**31, 20_000), logprobs=None
    )
    wait(log)
    write_steps(log, 6, 7)
    large = "file-000005-train-000005-00"
    assert names_of(tmp_path)[:2] == [large, "file-000006-train-000006-00"]
    assert names_of(tmp_path)[3:] == ["files-000000-000002", "files-000003-000004"]
    log.finish()
    merged = ["files-000000-000002", "files-000003-000004", "files-000006-000007"]
    assert names_of(tmp_path) == [large, *merged]
    assert steps_of(tmp_path) == [4, 0, 1, 2, 3, 5, 6, 7]
    assert [*tmp_path.rglob(".*.tmp")] == []


MERGE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from swift_grpo_ext.record import log as sample_log
from tests.rig.record.rows import open_log, row_of, sample_id

run_dir, calls = Path(sys.argv[1]), int(sys.argv[2])
log = open_log(run_dir)
for step in range(4):
    log.append([row_of(sample_id(step))])
log.flush()
upstream = CALL

def kill(*args, **kwargs):
    global calls
    calls -= 1
    if not calls:
        os.kill(os.getpid(), signal.SIGKILL)
    return upstream(*args, **kwargs)

CALL = kill
log.finish()
"""


@pytest.mark.parametrize(
    ("call", "number", "left"),
    [
        ("sample_log.pq.ParquetWriter.write_table", 2, 4),  # the merged file is half written
        ("os.fsync", 1, 4),
        ("Path.replace", 1, 4),
        ("Path.unlink", 1, 5),  # the merged file is there beside all others
        ("Path.unlink", 3, 3),
    ],
)
def test_a_merge_that_dies_loses_and_doubles_nothing(
    call: str, number: int, left: int, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", MERGE_AND_DIE.replace("CALL", call), str(tmp_path), str(number)]
    assert subprocess.run(argv, cwd=ROOT).returncode == -signal.SIGKILL
    assert len(names_of(tmp_path)) == left
    assert len([*tmp_path.rglob(".*.tmp")]) == (call != "Path.unlink")
    assert read_rows(tmp_path) == [row_of(sample_id(step)) for step in range(4)]
    session = claim_session(tmp_path)
    assert [*tmp_path.rglob(".*.tmp")] == []
    assert len(names_of(tmp_path)) == (4 if left == 4 else 1)
    write_steps(open_log(tmp_path, session=session, start_step=4), 4)
    assert read_rows(tmp_path) == [row_of(sample_id(step)) for step in range(5)]


def test_rows_of_one_round_are_one_file(tmp_path: Path) -> None:
    """Rows of several rounds may be mixed in a call."""
    log = open_log(tmp_path)
    rows = [row_of(sample_id(step, group=group)) for group in (1, 0) for step in (0, 1)]
    log.append(rows)
    log.flush()
    assert names_of(tmp_path) == ["file-000000-train-000000-00", "file-000001-train-000001-00"]
    assert read_rows(tmp_path) == sorted(rows, key=lambda row: row.sample_id)


def test_a_damaged_file_is_never_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(tmp_path)
    write_steps(log, 0, 1, 2)
    file = record_files(SAMPLES.folder(tmp_path))[1].path
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    log.finish()
    assert "files of the run's record cannot be merged or removed (" in caplog.text
    assert len(names_of(tmp_path)) == 3
    file.write_bytes(content)
    assert steps_of(tmp_path) == [0, 1, 2]


def all_files(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.rglob("*") if path.is_file()]


def score(step: int) -> RewardRow:
    """Return the score of a sample, with values that do not compress."""
    values = np.random.default_rng(step).random(200).tolist()
    return RewardRow(
        sample_id=sample_id(step), reward=0.5, rewards=[(f"{v}", v) for v in values],
        truncated=False, replaced=False, fate="trained",
    )  # fmt: skip


@pytest.mark.parametrize("large", [1, sample_log.LARGE])  # some files are merged, or none
def test_a_bound_holds_for_the_whole_record(
    tmp_path: Path, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It includes earlier sessions and scores. The oldest rounds go first."""
    monkeypatch.setattr(sample_log, "LARGE", large)
    ids = np.random.default_rng(0).integers(0, 2**31, 2000)  # these do not compress

    def write(log: SampleLog, steps: range) -> None:
        for step in steps:
            write_steps(log, step, token_ids=ids, logprobs=None)
            log.append([score(step)], REWARDS)
            wait(log)

    write(open_log(tmp_path), range(32))
    before = Record(tmp_path)
    before.refresh()
    assert set(steps_of(tmp_path)) == set(range(32))
    max_bytes = 250_000
    assert sum(path.stat().st_size for path in all_files(tmp_path)) > 1.5 * max_bytes
    log = open_log(tmp_path, session=1, start_step=32, max_bytes=max_bytes)
    for step in range(32, 72):
        write(log, range(step, step + 1))
        assert sum(path.stat().st_size for path in all_files(tmp_path)) <= max_bytes
        steps = steps_of(tmp_path)
        assert steps == list(range(steps[0], step + 1))  # none is missing in the middle
    scored = set(read_rewards(tmp_path, columns=["step"])["step"].to_pylist())
    assert set(steps) >= scored >= set(steps[8:])  # files of either table may be a bit longer
    assert sum(path.stat().st_size for path in all_files(tmp_path)) > 0.7 * max_bytes
    found = before.rows("select distinct step from samples")  # others were removed meanwhile
    assert sorted(row["step"] for row in found) == steps
    write(open_log(tmp_path, session=2, start_step=72, max_bytes=1), range(72, 74))
    assert steps_of(tmp_path) == [73]  # the newest file is never removed


def test_files_that_cannot_be_removed_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed removal does not count as a failed write."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    log = open_log(tmp_path, max_bytes=1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        write_steps(log, 0, 1, 2)
    [message] = caplog.messages
    assert "cannot be merged or removed ([Errno 30] Read-only file system" in message
    assert steps_of(tmp_path) == [0, 1, 2]
    write_steps(log, 3)
    assert steps_of(tmp_path) == [3]


@pytest.mark.parametrize("num_samples", [64, 1024])
def test_what_a_sample_takes_beside_its_tokens(tmp_path: Path, num_samples: int) -> None:
    """V1's bounds hold for seeds and scores that do not compress."""
    promises = Path(__file__).parents[3] / "docs/promises.md"
    pattern = r"of 64 samples .* at most (\d+) bytes beside .* of 1,024 samples .* and (\d+) bytes"
    promised = re.search(pattern, promises.read_text(encoding="utf-8"))
    assert promised
    rng, log = np.random.default_rng(0), open_log(tmp_path)
    for step in range(4):
        names = [sample_id(step, group=n // 8, index=n % 8) for n in range(num_samples)]
        log.append([replace(ROW, sample_id=n, seed=int(rng.integers(2**62))) for n in names])
        scores = [
            RewardRow(
                sample_id=name, reward=a, rewards=[("Accuracy", b), ("Format", c)], advantage=d,
                gap_mean=e, gap_max=f, truncated=False, replaced=False, fate="trained",
            )
            for name, (a, b, c, d, e, f) in zip(names, rng.random((num_samples, 6)), strict=True)
        ]  # fmt: skip
        log.append(scores, REWARDS)
    log.flush()
    beside = sum(path.stat().st_size for path in all_files(tmp_path)) / num_samples / 4
    assert beside <= int(promised[1 if num_samples == 64 else 2])


def test_a_bad_row_is_an_error(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    bad = row_of(sample_id(3, index=5), token_ids=[1, 2, 3], logprobs=[-1.0])
    counts = "train round 3.0, group 0, sample 5: 3 tokens and 1 log-probabilities"
    with pytest.raises(ValueError, match=counts):
        log.append([ROW, bad])
    log.append([ROW])
    log.flush()
    assert read_rows(tmp_path) == [ROW]


@contextmanager
def full_disk() -> Iterator[None]:
    """Let files take 1,000 bytes at most."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_a_full_disk_did_not_take_is_written_in_its_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier rounds stay readable. Scores wait with their samples."""
    log = open_log(tmp_path)

    def write(*steps: int) -> None:
        for step in steps:
            write_steps(log, step)
            log.append([score(step)], REWARDS)
            log.flush()

    write(0, 1, 2)
    with full_disk():
        write(*range(3, 9))
        assert steps_of(tmp_path) == [0, 1, 2]
    assert caplog.messages == [
        f"{tmp_path}: the run's record cannot be written ([Errno 27] File too large). Rounds wait "
        "in memory and are tried again with the next one. Beyond 256 MiB the oldest are lost. Make "
        "room there, or correct --output_dir. The training goes on."
    ]
    write(9, 10, 11)
    assert steps_of(tmp_path) == list(range(12))
    assert read_rewards(tmp_path, columns=["step"])["step"].to_pylist() == list(range(12))
    names = [f"file-{step:06d}-train-{step:06d}-00" for step in range(12)]
    assert names_of(tmp_path) == names
    assert not [*tmp_path.rglob(".*.tmp")]  # nothing half-written is left
    with full_disk():
        write(12)
    log.finish()
    assert steps_of(tmp_path) == list(range(13))
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("call", ["stat", "fsync"])
def test_what_fails_behind_a_files_name_doubles_no_round(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk fails for a moment, and the round is written again."""
    log = open_log(tmp_path)
    write_steps(log, 0)
    owner: Any = Path if call == "stat" else os
    own, num_failed = getattr(owner, call), 0

    def fail_once(path: Any, **kwargs: Any) -> Any:
        """Fail at the renamed file, or at its folder."""
        nonlocal num_failed
        is_behind = Path(path).suffix == ".parquet" if call == "stat" else is_folder(path)
        if is_behind and not num_failed:
            num_failed += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return own(path, **kwargs)

    def is_folder(descriptor: int) -> bool:
        return S_ISDIR(os.fstat(descriptor).st_mode)

    with monkeypatch.context() as patched:
        patched.setattr(owner, call, fail_once)
        write_steps(log, 1, 2)
    assert num_failed == (call == "fsync")  # the file's bytes are known without a question
    assert names_of(tmp_path) == [f"file-{step:06d}-train-{step:06d}-00" for step in range(3)]
    log.finish()
    assert steps_of(tmp_path) == [0, 1, 2]


def test_what_waits_for_a_full_disk_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "WAITING_BYTES", 1 << 20)
    log = open_log(tmp_path)
    with full_disk():
        write_steps(log, *range(6), text="7" * (300 << 10))
    write_steps(log, 6)
    assert steps_of(tmp_path) == [3, 4, 5, 6]
    [message] = caplog.messages
    assert "Beyond 1 MiB the oldest are lost" in message
    with full_disk():
        write_steps(log, 7, 8)
        log.finish()
    lost = f"5 rounds of the run's record are lost: {tmp_path} could not be written."
    assert caplog.messages[-1] == lost


def test_a_damaged_file_is_named_and_left_out_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(tmp_path)
    write_steps(log, 0, 1, 2)
    log.finish()
    write_session(tmp_path, [row_of(sample_id(3))], session=1, start_step=3)
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
    for content in (bytes(flipped), whole[:-1], nameless.getvalue()):
        file.path.write_bytes(content)
        caplog.clear()
        assert [row.sample_id.step for row in read_rows(tmp_path)] == [3]
        [message] = caplog.messages
        beginning, _, cause = message.partition("(")
        assert beginning == f"{file.path} cannot be read "
        assert cause.endswith("rows are left out. If it is damaged, restore it from a copy.")
        assert len(cause.partition(")")[0]) > len("None")
