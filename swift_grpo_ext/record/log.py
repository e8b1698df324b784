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
from contextlib import suppress
from dataclasses import dataclass, field
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

WAITING_BYTES = 256 << 20
"""Memory for what a disk that failed has not taken, in each process: about 22 million tokens."""

DICTIONARY_COLUMNS = [
    *("phase", "replica", "finish_reason", "stop_reason", "fingerprint", "prompt"),
    *("columns", "media.list.element", "fate", "rewards.key_value.key"),
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


@dataclass(kw_only=True)
class _Newest:
    """The newest file of a table, and the rounds that go there next."""

    table: Table
    part: int = 0
    groups: list[pa.Table] = field(default_factory=list)
    """The file's row groups."""

    waiting: list[pa.Table] = field(default_factory=list)
    """Row groups that are not on disk: those of the last call, and more where the disk failed."""


class SampleLog:
    """Writes one rank's rows of one session beside the training; for one thread at a time.

    A disk that fails does not end the training: what it did not take waits in memory, and is
    written in its order once it can be.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        session: int,
        start_step: int,
        rank: int,
        num_ranks: int = 1,
        max_bytes: int | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            session: the number from `claim_session`, the same on all ranks.
            start_step: optimizer step of the checkpoint that the session was resumed from, 0 for a
                run from the beginning; the same on all ranks.
            rank: the rank of this process.
            num_ranks: how many ranks write.
            max_bytes: bound of all files of all tables in the folder, those of other ranks and of
                earlier sessions included; None for no bound. The newest file of a rank that writes
                is never removed.
        """
        self._run_dir = run_dir
        self._session = session
        self._prefix = f"session-{session:04d}-step-{start_step:06d}-rank-{rank:05d}"
        self._max_bytes = max_bytes
        bound = FILE_BYTES * PARTS if max_bytes is None else max_bytes // num_ranks
        self._file_bytes = min(FILE_BYTES, bound // PARTS)
        self._newest: dict[str, _Newest] = {}
        """The newest file of each table, by the table's name."""

        self._unchanging: dict[Path, os.stat_result] = {}
        """Files that are written no more are asked of the disk once."""

        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sample-log")
        self._unwritten: list[Future[None]] = []
        self._troubles: set[str] = set()
        """What was warned of, and holds still."""

    def append(self, rows: Sequence[SampleRow | RewardRow], table: Table = SAMPLES) -> None:
        """Have the thread write rows, a row group for each round; `flush` waits for it."""
        if rows:
            self._unwritten.append(self._writer.submit(self._write, rows, table))

    def flush(self) -> None:
        """Wait until all rows are on disk, or wait for a disk that failed.

        Raises:
            ValueError: a row's counts disagree or a value does not fit; nothing was written of the
                rows that were appended with it.
        """
        while self._unwritten:
            self._unwritten.pop(0).result()

    def finish(self) -> None:
        """Try once more to write what waits for a disk that failed: no rows may come any more."""
        self._writer.submit(self._write_waiting).result()
        if waiting := [group for newest in self._newest.values() for group in newest.waiting]:
            logger.warning(
                "%d rounds of the run's record are lost: %s cannot be written still, and the "
                "training has ended.",
                *(len(waiting), self._run_dir),
            )

    def _write(self, rows: Sequence[SampleRow | RewardRow], table: Table) -> None:
        """Write rows, a row group for each round; runs in the thread."""
        rounds = groupby(rows, key=lambda row: row.sample_id.round)
        groups = [to_arrow(list(of), table, session=self._session) for _, of in rounds]
        self._newest.setdefault(table.name, _Newest(table=table)).waiting += groups
        self._write_waiting()

    def _write_waiting(self) -> None:
        folder = Path(self._run_dir)
        try:
            for newest in self._newest.values():
                while newest.waiting:
                    self._write_next(newest)
            self._troubles -= {"full", "lost"}
        except OSError as e:
            self._warn(
                "full",
                f"{folder}: the run's record cannot be written there ({e}). Rounds wait in memory, "
                f"up to {WAITING_BYTES >> 20} MiB of them, and are tried again with the next one. "
                "Make room there, or correct --output_dir. The training goes on.",
            )
            self._forget_oldest()
        if self._max_bytes is not None:
            try:
                self._remove_oldest(self._max_bytes)
            except OSError as e:
                self._warn(
                    "unbounded",
                    f"{folder}: the oldest rounds of the run's record cannot be removed ({e}), so "
                    "that --sample_log_gb does not bound it. Let this process remove files there.",
                )

    def _write_next(self, newest: _Newest) -> None:
        """Write what waits to the newest file, as far as it belongs there, or begin the next."""
        part, groups = newest.part, newest.groups
        if self._is_full(groups):
            part, groups = part + 1, []
        num_added = 1
        while num_added < len(newest.waiting) and not self._is_full(
            [*groups, *newest.waiting[:num_added]]
        ):
            num_added += 1
        groups = groups + newest.waiting[:num_added]
        try:
            path = newest.table.folder(self._run_dir) / f"{self._prefix}-part-{part:04d}.parquet"
            _write_file(path, groups)
            newest.part, newest.groups = part, groups
        except pa.ArrowException as e:  # not the disk's fault: another time it fails again
            self._warn("arrow", f"{path}: {num_added} rounds of the run's record are lost ({e}).")
        del newest.waiting[:num_added]

    def _is_full(self, groups: Sequence[pa.Table]) -> bool:
        is_large = sum(group.nbytes for group in groups) >= self._file_bytes
        return bool(groups) and (is_large or len(groups) >= ROUNDS_PER_FILE)

    def _forget_oldest(self) -> None:
        """Hold `WAITING_BYTES` of what waits at most."""
        waiting = [newest.waiting for newest in self._newest.values()]
        excess = sum(group.nbytes for groups in waiting for group in groups) - WAITING_BYTES
        largest = max(waiting, key=lambda groups: sum(group.nbytes for group in groups))
        while excess > 0 and len(largest) > 1:
            excess -= largest.pop(0).nbytes
            self._warn(
                "lost",
                f"{self._run_dir}: more than {WAITING_BYTES >> 20} MiB of the run's record wait "
                "for the disk; from now on the oldest rounds are lost.",
            )

    def _remove_oldest(self, max_bytes: int) -> None:
        """Remove files of any rank, session and table until what is left fits.

        All ranks do, at any time: of the same files they choose the same.
        """
        from swift_grpo_ext.record.rewards import REWARDS  # which imports this module

        files: list[tuple[RecordFile, os.stat_result]] = []
        unchanging: dict[Path, os.stat_result] = {}
        for table in (SAMPLES, REWARDS):
            table_files = record_files(table.folder(self._run_dir))
            newest = {file.rank: file for file in table_files if file.session == self._session}
            for file in table_files:
                with suppress(FileNotFoundError):  # another rank has removed it
                    status = self._unchanging.get(file.path) or file.path.stat()
                    files.append((file, status))
                    if newest.get(file.rank) != file:
                        unchanging[file.path] = status
        self._unchanging = unchanging
        excess = sum(status.st_size for _, status in files) - max_bytes
        for file, status in sorted(files, key=lambda f: (f[0].session, f[1].st_mtime_ns, f[0])):
            if excess > 0 and file.path in unchanging:
                file.path.unlink(missing_ok=True)
                excess -= status.st_size

    def _warn(self, trouble: str, message: str) -> None:
        """Warn of something once, until it is over."""
        if trouble not in self._troubles:
            logger.warning(message)
        self._troubles.add(trouble)


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
