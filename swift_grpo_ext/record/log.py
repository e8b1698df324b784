"""Writes the tables of a run's record, round by round, as Parquet files.

    RUN_DIR/samples/session-0000-step-000000-rank-00000-rounds-000000-000031-1b0ec59a.parquet

Each rank of each session (a start of the trainer, from the checkpoint of a step) writes files of
its own, so that ranks need not wait for one another. A file is never changed: it is written under
another name, and gets its own once it is whole and on disk. It holds a row group for each round.
Parquet has checksums of its pages only, and pyarrow ends the process over some damaged footers:
the name ends with the CRC-32 of the footer.

A round begins as a file of its own. So that a long run does not end with a file for each round,
`ROUNDS_PER_FILE` of them are written once more as one; the new file is there before the old ones
go, and readers pass over a file whose rounds another one holds.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from swift_grpo_ext.record.row import ROUND_COLUMNS, SAMPLES, Row, Table, to_arrow

logger = logging.getLogger(__name__)

ROUNDS_PER_FILE = 32
FILE_BYTES = 8 << 20
"""Rounds that take more in memory (about 0.7 million tokens, 3 MB on disk) are never written
again: their files are large enough."""

PARTS = 8
"""A bounded log keeps at least so many files, for its oldest to go one by one."""

ZSTD_LEVEL = 7
"""Of 1.7 CPU-seconds for 10 million tokens, compression takes 1.3; level 9 takes 2.0, and 1% less
room."""

PAGE_BYTES = 16 << 20
"""Repetitions are looked for within a page: 1 MiB, pyarrow's own, takes 4% more room."""

DICTIONARY_COLUMNS = [
    *("phase", "replica", "finish_reason", "stop_reason", "fingerprint", "prompt"),
    *("media.list.element", "fate", "rewards.key_value.key"),
]
"""The columns whose texts come again, by their names in Parquet."""

FILE_NAME = re.compile(
    r"session-(\d+)-step-(\d+)-rank-(\d+)-rounds-(\d+)-(\d+)-([0-9a-f]{8})\.parquet"
)


class RecordFile(NamedTuple):
    """A file, and what its name says; files sort from the oldest to the newest."""

    session: int
    start_step: int
    """The optimizer step of the checkpoint that the session was resumed from."""

    rank: int
    first: int
    """The number of its first row group among those of this rank, session and table."""

    last: int
    footer_crc32: int
    path: Path

    def holds(self, other: RecordFile) -> bool:
        """Return True if the other file was rolled into this one."""
        same = (self.session, self.rank) == (other.session, other.rank)
        return same and self.first <= other.first and other.last <= self.last


def record_files(folder: Path) -> list[RecordFile]:
    """Return the files of a table, the oldest first; empty where there is no folder."""
    files = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = FILE_NAME.fullmatch(path.name)
        if match is not None:
            session, start_step, rank, first, last = map(int, match.groups()[:5])
            files.append(
                RecordFile(session, start_step, rank, first, last, int(match[6], 16), path)
            )
    return sorted(files)


def read_footer(file: BinaryIO) -> bytes:
    """Return the end of a Parquet file: the footer, its length in 4 bytes, and `PAR1`.

    Raises:
        OSError: the length is damaged.
    """
    file.seek(-8, os.SEEK_END)
    num_bytes = int.from_bytes(file.read(4), "little") + 8
    file.seek(-num_bytes, os.SEEK_END)
    return file.read()


def next_session(run_dir: str | os.PathLike[str]) -> int:
    """Return the number for a session that starts now: one more than the greatest, from 0.

    One rank calls it, before any rank has written, and tells the others. A session that ended
    before its first rows left no file; the next session takes its number.
    """
    files = record_files(SAMPLES.folder(run_dir))
    return max((file.session + 1 for file in files), default=0)


class SampleLog:
    """Writes one rank's rows of one session beside the training; for one thread at a time.

    A disk that fails does not end the training: a warning names the rounds that are lost.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        session: int,
        start_step: int,
        rank: int,
        max_bytes: int | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            session: the number from `next_session`, the same on all ranks.
            start_step: optimizer step of the checkpoint that the session was resumed from, 0 for a
                run from the beginning; the same on all ranks.
            rank: the rank of this process.
            max_bytes: bound of this rank's sample files, those of earlier sessions included; None
                for no bound. The newest file is never removed.
        """
        self._run_dir = run_dir
        self._session = session
        self._start_step = start_step
        self._rank = rank
        self._max_bytes = max_bytes
        self._file_bytes = min(FILE_BYTES, (max_bytes or FILE_BYTES * PARTS) // PARTS)
        self._num_row_groups: defaultdict[str, int] = defaultdict(int)
        self._small: defaultdict[str, list[tuple[RecordFile, int]]] = defaultdict(list)
        """By table, files that will be rolled into one, with their bytes in memory."""

        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sample-log")
        self._unwritten: list[Future[None]] = []

    def append(self, rows: Sequence[Row], table: Table = SAMPLES) -> None:
        """Have the thread write rows to a file of their own; `flush` waits for it."""
        if rows:
            self._unwritten.append(self._writer.submit(self._write, rows, table))

    def flush(self) -> None:
        """Wait until all rows are on disk.

        Raises:
            ValueError: a row's counts disagree or a value does not fit; nothing was written of the
                rows that were appended with it.
        """
        while self._unwritten:
            self._unwritten.pop(0).result()

    def _write(self, rows: Sequence[Row], table: Table) -> None:
        """Write a file, and roll or remove older ones; runs in the thread."""
        rounds = groupby(rows, key=lambda row: row.sample_id.round)
        groups = [to_arrow(list(of), table, session=self._session) for _, of in rounds]
        num_bytes = sum(group.nbytes for group in groups)
        is_large = num_bytes >= self._file_bytes
        small = self._small[table.name]
        try:
            if is_large:
                self._roll(table)  # its neighbours, as a file's name holds a range of rounds
            first = self._num_row_groups[table.name]
            file = self._write_file(table, first, groups)
            self._num_row_groups[table.name] += len(groups)
            if not is_large:
                small.append((file, num_bytes))
                if len(small) == ROUNDS_PER_FILE or sum(n for _, n in small) >= self._file_bytes:
                    self._roll(table)
            if self._max_bytes is not None and table == SAMPLES:
                self._remove_oldest(self._max_bytes)
        except (OSError, pa.ArrowException) as e:
            logger.warning(
                "%d rows of the table %s, from %s on, may be missing from the run's record: %s "
                "cannot be written (%s). Make room there, or correct --output_dir. The training "
                "goes on.",
                *(len(rows), table.name, rows[0].sample_id, table.folder(self._run_dir), e),
            )

    def _roll(self, table: Table) -> None:
        """Write the small files once more as one."""
        files = [file for file, _ in self._small[table.name] if file.path.exists()]
        self._small[table.name].clear()
        if len(files) < 2:
            return
        groups = []
        for file in files:
            source = pq.ParquetFile(file.path, page_checksum_verification=True)
            groups += [source.read_row_group(i) for i in range(source.num_row_groups)]
        self._write_file(table, files[0].first, groups)
        for file in files:
            file.path.unlink()

    def _write_file(self, table: Table, first: int, groups: Sequence[pa.Table]) -> RecordFile:
        """Write row groups as a new file; it is on disk when this returns.

        Raises:
            OSError: it cannot be written; no part of it is left.
        """
        last = first + len(groups) - 1
        name = f"session-{self._session:04d}-step-{self._start_step:06d}-rank-{self._rank:05d}"
        name += f"-rounds-{first:06d}-{last:06d}"
        folder = table.folder(self._run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{name}.tmp"  # pandas passes over names that begin so
        try:
            with unfinished.open("w+b") as file:
                with pq.ParquetWriter(
                    file,
                    groups[0].schema,
                    compression="zstd",
                    compression_level=ZSTD_LEVEL,
                    use_dictionary=DICTIONARY_COLUMNS,
                    use_byte_stream_split=["logprobs.list.element"],
                    data_page_size=PAGE_BYTES,
                    write_statistics=list(ROUND_COLUMNS),  # the reader's index; more takes 1 KB
                    write_page_checksum=True,
                ) as writer:
                    for group in groups:
                        writer.write_table(group, row_group_size=group.num_rows)
                file.flush()
                os.fsync(file.fileno())
                crc32 = zlib.crc32(read_footer(file))
            path = unfinished.rename(folder / f"{name}-{crc32:08x}.parquet")
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return RecordFile(self._session, self._start_step, self._rank, first, last, crc32, path)

    def _remove_oldest(self, max_bytes: int) -> None:
        files = [f for f in record_files(SAMPLES.folder(self._run_dir)) if f.rank == self._rank]
        sizes = [file.path.stat().st_size for file in files]
        excess = sum(sizes) - max_bytes
        for file, size in zip(files[:-1], sizes, strict=False):
            if excess <= 0:
                break
            file.path.unlink()
            excess -= size
