"""Writes the tables of a run's record as Parquet, a file for each round of each table.

    RUN_DIR/samples/session-0000-step-000000-file-000017-train-000017-00.parquet
    RUN_DIR/samples/session-0000-step-000000-files-000000-000016.parquet

A session is a start of the trainer, from the checkpoint of a step; its rank 0 writes. A file is
written under another name, and takes its own once it is whole and on disk. From then on it never
changes.

A query opens every file (0.4 CPU-ms each), so small ones that follow one another are merged. The
merged file has the first and last number in its name. Only once it is on disk are they removed.
Where a process dies between, the small ones stand there still: `record_files` leaves out what a
merged file holds, and the next session removes it.

A session takes its number by making `samples/.session-0000.lock`, which a disk grants to one
process alone, and locks it for as long as the process lives, so that no second training writes to
the folder: of a process that was killed, the kernel unlocks it. Where disks have no locks, two
trainings in one folder have numbers, and so files, of their own.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from swift_grpo_ext.checks.finding import Findings, error
from swift_grpo_ext.record.tables import (
    REWARDS,
    ROUND_COLUMNS,
    SAMPLES,
    TABLES,
    Row,
    Table,
    rounds_of,
)
from swift_grpo_ext.sampling.seeding import RoundId

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments

logger = logging.getLogger(__name__)

FILES = 64
"""So many files are merged into one: a run of 20,000 rounds keeps 313 of each table."""

FILE_BYTES = 64 << 20
"""Bytes on disk at which fewer are merged."""

LARGE = 8
"""A file of an eighth of that stays as it is: merging compresses rows once more (1.7 CPU-seconds
for 10 million tokens, which take 40 MB), and is for small ones."""

PARTS = 8
"""A bounded record keeps at least so many files, for its oldest to go one by one."""

ZSTD_LEVEL = 7
"""Of 1.7 CPU-seconds for 10 million tokens, compression takes 1.3; level 9 takes 2.0, and 1% less
room."""

PAGE_BYTES = 16 << 20
"""Repetitions are looked for within a page: 1 MiB, pyarrow's own, takes 4% more room."""

WAITING_BYTES = 256 << 20
"""Memory for what a disk that failed has not taken: about 20 million tokens."""

DICTIONARY_COLUMNS = [
    *("phase", "replica", "finish_reason", "stop_reason", "fingerprint", "prompt"),
    *("columns", "media.list.element", "fate", "rewards.key_value.key"),
]
"""The columns whose texts come again, by their names in Parquet."""

BOUNDED = (SAMPLES, REWARDS)
"""`--sample_log_gb` bounds these; a round's diversity takes 2 KB."""

FILE_NAME = re.compile(
    r"session-(\d+)-step-(\d+)-(?:files-(\d+)-(\d+)|file-(\d+)-(?:train|eval)-\d+-\d+)\.parquet"
)

LOCK_NAME = re.compile(r"\.session-(\d+)\.lock")

_held: dict[str, int] = {}
"""Descriptors of locks by path. None is closed before the process ends: to close any of a file's
descriptors ends all locks that the process has on it (fcntl(2))."""


class RecordFile(NamedTuple):
    """A file, and what its name says; files sort from the oldest to the newest."""

    session: int
    start_step: int
    """The optimizer step of the checkpoint that the session was resumed from."""

    first: int
    last: int
    """Numbers of the files that it holds, both its own where it was not merged."""

    path: Path

    def holds(self, other: RecordFile) -> bool:
        """Return whether the file was merged of another, or of one that it holds."""
        is_within = self.first <= other.first and other.last <= self.last
        return self[:2] == other[:2] and is_within and self != other


def parse_name(path: Path) -> RecordFile | None:
    """Return what a file's name says; None where it is no file of a record."""
    match = FILE_NAME.fullmatch(path.name)
    if match is None:
        return None
    session, start_step, first, last, number = match.groups()
    numbers = int(first or number), int(last or number)
    return RecordFile(int(session), int(start_step), *numbers, path)


def without_merged(files: Iterable[RecordFile]) -> list[RecordFile]:
    """Return the files from the oldest to the newest, but for those that a merged one holds."""
    kept: list[RecordFile] = []
    for file in sorted(files, key=lambda file: (*file[:3], -file.last)):
        if not (kept and kept[-1].holds(file)):
            kept.append(file)
    return kept


def record_files(folder: Path) -> list[RecordFile]:
    """Return the files that hold a table, the oldest first; empty where there is no folder."""
    return without_merged(filter(None, map(parse_name, folder.glob("*.parquet"))))


# --- sessions ---


class RunInUseError(RuntimeError):
    """Another training writes its record to the folder."""


def claim_session(run_dir: str | os.PathLike[str]) -> int:
    """Return the number of the session that starts now: one more than the greatest, from 0.

    Other processes are refused until this one ends. A folder that cannot be written is claimed by
    nobody.

    Raises:
        RunInUseError: a process that lives has claimed the folder.
        OSError: the folder cannot be read.
    """
    folder = SAMPLES.folder(run_dir)
    number = next_session(run_dir)
    with suppress(OSError):  # the log warns of what it cannot write
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            lock = folder.resolve() / f".session-{number:04d}.lock"
            try:
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                break
            except FileExistsError:  # another process came first
                number += 1
        _held[str(lock)] = descriptor
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = f"process {os.getpid()} on {socket.gethostname()} (since {now})"
        with suppress(OSError):  # a disk without locks
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, owner.encode())
        # After our own lock: of two trainings that begin together, at least one sees the other.
        if reason := reason_against(run_dir):
            lock.unlink()
            raise RunInUseError(f"--output_dir {os.fspath(run_dir)}: {reason}")
        # A process that was killed has left files that are not whole, and small ones that a merged
        # one holds.
        for table in TABLES:
            for unfinished in table.folder(run_dir).glob(".session-*.tmp"):
                unfinished.unlink()
            files = {*filter(None, map(parse_name, table.folder(run_dir).glob("*.parquet")))}
            for merged in files.difference(without_merged(files)):
                merged.path.unlink()
    return number


def check_output_dir(args: RLHFArguments) -> Findings:
    """Refuse a folder that another training writes its record to; the first rank looks."""
    writes = args.sample_log != "none" or "diversity" in args.callbacks
    if writes and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the record warns of a folder that cannot be read
            if reason := reason_against(args.output_dir):
                yield error(f"output_dir {args.output_dir}", reason)


def next_session(run_dir: str | os.PathLike[str]) -> int:
    """Return one more than the greatest number of a session that left files, from 0."""
    tables = [table.folder(run_dir) for table in TABLES]
    numbers = [file.session for folder in tables for file in record_files(folder)]
    return max([*numbers, *_locks(run_dir)], default=-1) + 1


def reason_against(run_dir: str | os.PathLike[str]) -> str:
    """Say which other training writes its record to the folder, and what to do; "" for none."""
    for lock in _locks(run_dir).values():
        if str(lock) not in _held:
            # An exclusive lock asks for a descriptor that may write.
            with suppress(OSError), lock.open("r+") as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):  # systems raise one or the other
                    return (
                        f"{file.read() or 'another process'} trains into it. Expected a folder of "
                        "its own for each training, or one would replace what the other writes. "
                        "End that process, or give this training another --output_dir. If that "
                        f"machine is gone and the disk does not know it, remove {lock}."
                    )
    return ""


def _locks(run_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the files by which sessions were claimed, by number; their paths are as in `_held`."""
    found = SAMPLES.folder(run_dir).resolve().glob(".session-*.lock")
    named = ((LOCK_NAME.fullmatch(path.name), path) for path in found)
    return {int(match[1]): path for match, path in named if match}


# --- the writer ---


@dataclass(kw_only=True)
class _Written:
    """How far a table is written."""

    table: Table
    number: int = 0
    """The next file's."""

    waiting: list[tuple[RoundId, pa.Table]] = field(default_factory=list)
    """Rounds that are not on disk: those of the last call, and more where the disk failed."""

    unmerged: dict[RecordFile, int] = field(default_factory=dict)
    """The files since the last that was merged or is large, with their bytes."""


class SampleLog:
    """Writes the rows of one session beside the training; for one thread at a time.

    A disk that fails does not end the training: what it did not take waits in memory, and is
    written in its order once it can be.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        session: int,
        start_step: int,
        max_bytes: int | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            session: the number from `claim_session`.
            start_step: optimizer step of the checkpoint that the session was resumed from, 0 for a
                run from the beginning.
            max_bytes: bound of all files of `BOUNDED` in the folder, those of earlier sessions
                included; None for no bound. The newest file of a table is never removed.
        """
        self._run_dir = run_dir
        self._session, self._start_step = session, start_step
        self.max_bytes = max_bytes
        bound = FILE_BYTES * PARTS if max_bytes is None else max_bytes
        self._file_bytes = min(FILE_BYTES, bound // PARTS)
        self._tables = {table.name: _Written(table=table) for table in TABLES}
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="sample-log")
        self._unwritten: list[Future[None]] = []
        self._troubles: set[str] = set()
        """What was warned of, and holds still."""

    def append(self, rows: Sequence[Row], table: Table = SAMPLES) -> None:
        """Have the thread write rows, a file for each round; `flush` waits for it.

        Raises:
            ValueError: a row's counts disagree or a value does not fit; nothing is written.
        """
        rounds = rounds_of(rows, table, session=self._session)
        self._unwritten.append(self.writer.submit(self._write, rounds, table))

    def flush(self) -> None:
        """Wait until all rows are on disk, or wait for a disk that failed."""
        while self._unwritten:
            self._unwritten.pop(0).result()

    def finish(self) -> None:
        """Merge the files that are left, and try once more to write what waits for a disk that
        failed: no rows may come any more."""
        # In the thread, which alone touches what is unwritten and unmerged.
        self.writer.submit(self._write_waiting).result()
        for written in self._tables.values():
            self.writer.submit(self._merge, written).result()
        if num_lost := sum(len(written.waiting) for written in self._tables.values()):
            logger.warning(
                "%d rounds of the run's record are lost: %s cannot be written still, and the "
                "training has ended.",
                *(num_lost, self._run_dir),
            )

    def _write(self, rounds: list[tuple[RoundId, pa.Table]], table: Table) -> None:
        """Write rounds, a file each; runs in the thread."""
        self._tables[table.name].waiting += rounds
        self._write_waiting()
        for written in self._tables.values():
            if self._is_due(written):
                self.writer.submit(self._merge, written)  # `flush` need not wait for it

    def _write_waiting(self) -> None:
        """Write what waits, in its order; hold `WAITING_BYTES` at most of what the disk refuses."""
        folder = Path(self._run_dir)
        try:
            for written in self._tables.values():
                while written.waiting:
                    self._write_next(written)
            self._troubles -= {"full", "lost"}
        except OSError as e:
            self._warn(
                "full",
                f"{folder}: the run's record cannot be written there ({e}). Rounds wait in memory, "
                f"up to {WAITING_BYTES >> 20} MiB of them, and are tried again with the next one. "
                "Make room there, or correct --output_dir. The training goes on.",
            )
            waiting = [written.waiting for written in self._tables.values()]
            excess = sum(rows.nbytes for rounds in waiting for _, rows in rounds) - WAITING_BYTES
            largest = max(waiting, key=lambda rounds: sum(rows.nbytes for _, rows in rounds))
            while excess > 0 and len(largest) > 1:  # the newest round stays, however large
                excess -= largest.pop(0)[1].nbytes
                self._warn(
                    "lost",
                    f"{folder}: more than {WAITING_BYTES >> 20} MiB of the run's record wait for "
                    "the disk; from now on the oldest rounds are lost.",
                )
        self._remove_oldest()

    def _write_next(self, written: _Written) -> None:
        """Write the round that has waited longest."""
        (round_, rows), number = written.waiting[0], written.number
        name = (
            f"session-{self._session:04d}-step-{self._start_step:06d}-"
            f"file-{number:06d}-{round_.phase}-{round_.step:06d}-{round_.number:02d}.parquet"
        )
        path = written.table.folder(self._run_dir) / name
        try:
            size = _write_file(path, rows.schema, [rows])
        except pa.ArrowException as e:
            # Not the disk's fault: it would fail each time, and hold up all rounds behind it.
            self._warn("arrow", f"{path}: a round of the run's record is lost ({e}).")
        else:
            written.number += 1
            file = RecordFile(self._session, self._start_step, number, number, path)
            written.unmerged[file] = size
        del written.waiting[0]

    # --- few files, and not too many bytes ---

    def _is_due(self, written: _Written) -> bool:
        sizes = [*written.unmerged.values()]
        is_large = bool(sizes) and sizes[-1] * LARGE >= self._file_bytes
        return is_large or len(sizes) >= FILES or sum(sizes) >= self._file_bytes

    def _merge(self, written: _Written) -> None:
        """Replace the files of a table that are not merged yet by one; a large one that ends them
        stays."""
        sizes, written.unmerged = written.unmerged, {}
        if sizes and [*sizes.values()][-1] * LARGE >= self._file_bytes:
            sizes.popitem()
        if len(sizes) < 2:
            return
        self._remove_oldest(room=sum(sizes.values()))  # for a moment, both take room
        try:
            # `--sample_log_gb` removes the oldest: the numbers of those behind follow one another.
            files = [file for file in sizes if file.path.exists()]
            if len(files) < 2:
                return
            first, last = files[0], files[-1]
            prefix = first.path.name.partition("-file-")[0]
            path = first.path.with_name(f"{prefix}-files-{first.first:06d}-{last.last:06d}.parquet")
            # One is in memory at a time. A damaged one raises, and all stay: readers leave a
            # damaged file out whole, and would lose 64 rounds with a merged one.
            rounds = (pq.ParquetFile(f.path, page_checksum_verification=True).read() for f in files)
            _write_file(path, pq.read_schema(first.path), rounds)
            for file in files:  # only now: a process that dies before leaves rounds twice
                file.path.unlink(missing_ok=True)
        except (OSError, ValueError, pa.ArrowException) as e:
            self._warn(
                "unmerged",
                f"{written.table.folder(self._run_dir)}: small files of the run's record cannot be "
                f"merged ({e}). They are read as they are.",
            )

    def _remove_oldest(self, *, room: int = 0) -> None:
        """Remove files of any session until what is left, and `room`, fit."""
        if self.max_bytes is None:
            return
        sizes: dict[RecordFile, int] = {}
        newest: set[RecordFile] = set()
        try:
            for table in BOUNDED:
                files = record_files(table.folder(self._run_dir))
                newest |= {*files[-1:]}
                sizes |= {file: file.path.stat().st_size for file in files}
            excess = sum(sizes.values()) + room - self.max_bytes
            for file in sorted(sizes, key=lambda file: (file.session, file.last)):
                if excess > 0 and file not in newest:
                    file.path.unlink(missing_ok=True)
                    excess -= sizes[file]
        except OSError as e:
            self._warn(
                "unbounded",
                f"{self._run_dir}: the oldest rounds of the run's record cannot be removed ({e}), "
                "so that --sample_log_gb does not bound it. Let this process remove files there.",
            )

    def _warn(self, trouble: str, message: str) -> None:
        """Warn of something once, until it is over."""
        if trouble not in self._troubles:
            logger.warning(message)
        self._troubles.add(trouble)


def _write_file(path: Path, schema: pa.Schema, rounds: Iterable[pa.Table]) -> int:
    """Write rounds as the row groups of a file, and return its bytes; it is on disk when this
    returns.

    Raises:
        OSError: it cannot be written, or may not be on disk yet; to write it again does no harm.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")  # pandas passes over names that begin so
    try:
        with unfinished.open("wb") as file:
            with pq.ParquetWriter(
                file,
                schema,
                compression="zstd",
                compression_level=ZSTD_LEVEL,
                use_dictionary=DICTIONARY_COLUMNS,
                # The high bytes of numbers, laid apart from the low ones, compress.
                use_byte_stream_split=["logprobs.list.element"],
                data_page_size=PAGE_BYTES,
                write_statistics=list(ROUND_COLUMNS),  # for queries of some steps; more takes 1 KB
                write_page_checksum=True,
                store_schema=False,  # Arrow's, which would take 2 KB
            ) as writer:
                for rows in rounds:
                    writer.write_table(rows, row_group_size=rows.num_rows)
            file.flush()
            size = file.tell()
            os.fsync(file.fileno())
        unfinished.replace(path)  # after its bytes: a crash must not leave the name without them
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name is on disk, too
        finally:
            os.close(folder)
        return size
    except (OSError, ValueError, pa.ArrowException):  # of the disk, or of files that `rounds` reads
        unfinished.unlink(missing_ok=True)
        raise
