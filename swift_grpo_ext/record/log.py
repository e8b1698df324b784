"""Writes the tables of a run's record, round by round, as Parquet files.

    RUN_DIR/samples/session-0000-step-000000-rank-00000-part-0000.parquet

Each rank of each session (a start of the trainer, from the checkpoint of a step) writes files of
its own, so that ranks need not wait for one another. A file holds a row group for each round.

Parquet files cannot be appended to: the newest file of a rank is written anew with each round,
under another name, and takes the old one's place once it is whole and on disk. So that this costs
little, a file that is large enough stays as it is, and the next part begins. Rounds keep their
place in a file.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from swift_grpo_ext.record.row import ROUND_COLUMNS, SAMPLES, SampleRow, Table, to_arrow

if TYPE_CHECKING:
    from swift_grpo_ext.record.rewards import RewardRow

logger = logging.getLogger(__name__)

ROUNDS_PER_FILE = 32
FILE_BYTES = 4 << 20
"""Bytes in memory (about 0.35 million tokens, 1.5 MB on disk) from which on a file stays as it is:
to write half of it anew takes 0.03 CPU-seconds a round."""

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

FILE_NAME = re.compile(r"session-(\d+)-step-(\d+)-rank-(\d+)-part-(\d+)\.parquet")


class RecordFile(NamedTuple):
    """A file, and what its name says; files sort from the oldest to the newest."""

    session: int
    start_step: int
    """The optimizer step of the checkpoint that the session was resumed from."""

    rank: int
    part: int
    path: Path


def record_files(folder: Path) -> list[RecordFile]:
    """Return the files of a table, the oldest first; empty where there is no folder."""
    files = []
    for path in folder.glob("*.parquet"):
        if match := FILE_NAME.fullmatch(path.name):
            session, start_step, rank, part = map(int, match.groups())
            files.append(RecordFile(session, start_step, rank, part, path))
    return sorted(files)


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
            session: the number from `claim_session`, the same on all ranks.
            start_step: optimizer step of the checkpoint that the session was resumed from, 0 for a
                run from the beginning; the same on all ranks.
            rank: the rank of this process.
            max_bytes: bound of this rank's sample files, those of earlier sessions included; None
                for no bound. The newest file is never removed.
        """
        self._run_dir = run_dir
        self._session = session
        self._rank = rank
        self._prefix = f"session-{session:04d}-step-{start_step:06d}-rank-{rank:05d}"
        self._max_bytes = max_bytes
        self._file_bytes = FILE_BYTES if max_bytes is None else min(FILE_BYTES, max_bytes // PARTS)
        self._newest: dict[str, tuple[int, list[pa.Table]]] = {}
        """By table, the newest file's part number and row groups."""

        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sample-log")
        self._unwritten: list[Future[None]] = []

    def append(self, rows: Sequence[SampleRow | RewardRow], table: Table = SAMPLES) -> None:
        """Have the thread write rows, a row group for each round; `flush` waits for it."""
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

    def _write(self, rows: Sequence[SampleRow | RewardRow], table: Table) -> None:
        """Write rows to the newest file, or begin the next; runs in the thread."""
        part, groups = self._newest.get(table.name, (0, []))
        is_large = sum(group.nbytes for group in groups) >= self._file_bytes
        if groups and (is_large or len(groups) >= ROUNDS_PER_FILE):
            part, groups = part + 1, []
        rounds = groupby(rows, key=lambda row: row.sample_id.round)
        added = [to_arrow(list(of), table, session=self._session) for _, of in rounds]
        groups = groups + added
        path = table.folder(self._run_dir) / f"{self._prefix}-part-{part:04d}.parquet"
        try:
            _write_file(path, groups)
            self._newest[table.name] = part, groups
            if self._max_bytes is not None and table == SAMPLES:
                self._remove_oldest(self._max_bytes)
        except (OSError, pa.ArrowException) as e:
            logger.warning(
                "%d rows of the table %s, from %s on, may be missing from the run's record: %s "
                "cannot be written (%s). Make room there, or correct --output_dir. The training "
                "goes on.",
                *(len(rows), table.name, rows[0].sample_id, path.parent, e),
            )

    def _remove_oldest(self, max_bytes: int) -> None:
        files = [f for f in record_files(SAMPLES.folder(self._run_dir)) if f.rank == self._rank]
        sizes = [file.path.stat().st_size for file in files]
        excess = sum(sizes) - max_bytes
        for file, size in zip(files[:-1], sizes, strict=False):
            if excess <= 0:
                break
            file.path.unlink()
            excess -= size


def _write_file(path: Path, groups: Sequence[pa.Table]) -> None:
    """Write row groups as a file, or in a file's place; it is on disk when this returns.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")  # pandas passes over names that begin so
    try:
        with unfinished.open("wb") as file:
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
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
