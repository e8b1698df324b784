"""Writes a run's record as Parquet: one file for each round of each table.

    RUN_DIR/samples/session-0000-step-000000-file-000017-train-000017-00.parquet
    RUN_DIR/samples/session-0000-step-000000-files-000000-000016.parquet

A session is one start of the trainer, at step 0 or from a checkpoint. Rank 0 writes its files. A
file gets its name once it is whole and on disk, and never changes afterwards. Consecutive small
files are merged: the merged one has the first and the last number in its name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
    RunDir,
    Table,
    rounds_of,
)
from swift_grpo_ext.sampling.seeding import RoundId

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments

logger = logging.getLogger(__name__)

# A query opens every file (0.4 CPU-ms each), so this many are merged into one: a run of 20,000
# rounds keeps 313 files of each table.
FILES = 64
FILE_BYTES = 64 << 20  # fewer files are merged if they have this size
# A file of 1 / `LARGE` of `FILE_BYTES` or more is not merged: a merge compresses its rows again
# (1.7 CPU-seconds for 10 million tokens, which take 40 MB).
LARGE = 8
PARTS = 8  # a bounded record keeps this many files or more, so that its oldest go one by one
ZSTD_LEVEL = 7  # 1.3 CPU-seconds for 10 million tokens; level 9 takes 2.0, and 1% less room
PAGE_BYTES = 16 << 20  # repetitions are found within a page: pyarrow's own 1 MiB takes 4% more room
GROUP_ROWS = 2048  # of a row group: a reader decompresses a column of these at once
WAITING_BYTES = 256 << 20  # of rounds that may wait in memory for the disk: 20 million tokens
BOUNDED = (SAMPLES, REWARDS)  # `--sample_log_gb` bounds them; a round's diversity takes 2 KB

# Columns with texts that repeat, by their names in Parquet.
DICTIONARY_COLUMNS = [
    *("phase", "replica", "finish_reason", "stop_reason", "fingerprint", "prompt"),
    *("columns", "media.list.element", "fate", "rewards.key_value.key"),
]

FILE_NAME = re.compile(
    r"session-(\d+)-step-(\d+)-(?:files-(\d+)-(\d+)|file-(\d+)-(?:train|eval)-\d+-\d+)\.parquet"
)

# Descriptors of this process's locks by path. They stay open until it ends: closing any descriptor
# of a file ends all locks that the process has on that file (fcntl(2)).
_held: dict[str, int] = {}


class RecordFile(NamedTuple):
    """A file, with the numbers in its name; files sort from the oldest to the newest."""

    session: int
    start_step: int  # optimizer step of the checkpoint that the session was resumed from
    first: int  # number of the first file that was merged; equal to `last` if nothing was
    last: int
    path: Path


def record_files(folder: Path) -> list[RecordFile]:
    """Return a table's files, oldest first, without those that a merged file contains."""
    kept: list[RecordFile] = []
    # A process that died in a merge has left both the merged file and the small ones.
    for file in sorted(_named_files(folder), key=lambda file: (*file[:3], -file.last)):
        if not kept or kept[-1][:2] != file[:2] or kept[-1].last < file.last:
            kept.append(file)
    return kept


def _named_files(folder: Path) -> Iterator[RecordFile]:
    for path in folder.glob("*.parquet"):
        if match := FILE_NAME.fullmatch(path.name):
            session, start_step, first, last, number = match.groups()
            yield RecordFile(
                *(int(session), int(start_step)), int(first or number), int(last or number), path
            )


# --- sessions ---


class RunInUseError(RuntimeError):
    """Another training writes its record to the folder."""


def claim_session(run_dir: RunDir) -> int:
    """Return the number of a new session, and lock the folder until this process ends. Raise
    `RunInUseError` if a living process has locked it, and `OSError` if it cannot be read."""
    folder = SAMPLES.folder(run_dir)
    number = next_session(run_dir)
    with suppress(OSError):  # `SampleLog` warns if it cannot write
        folder.mkdir(parents=True, exist_ok=True)
        # Creating the file claims the number. On a disk without locks, two trainings in one folder
        # still get different numbers, and so different names of files.
        while True:
            lock = folder.resolve() / f".session-{number:04d}.lock"
            try:
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                break
            except FileExistsError:  # another process came first
                number += 1
        _held[str(lock)] = descriptor
        # The kernel unlocks the file of a process that was killed.
        owner = f"process {os.getpid()} on {socket.gethostname()} (since {time.strftime('%F %T')})"
        with suppress(OSError):  # a disk without locks
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, owner.encode())
        # Only after our own lock: if two trainings begin together, at least one sees the other.
        if reason := reason_against(run_dir):
            lock.unlink()
            raise RunInUseError(f"--output_dir {os.fspath(run_dir)}: {reason}")
        # Remove a killed process's files: unfinished ones, and small ones that were merged.
        for folder in (table.folder(run_dir) for table in TABLES):
            merged = {*_named_files(folder)} - {*record_files(folder)}
            for path in (*folder.glob(".session-*.tmp"), *(file.path for file in merged)):
                path.unlink()
    return number


def check_output_dir(args: RLHFArguments) -> Findings:
    """Refuse a folder that another training writes its record to."""
    # Only rank 0 writes the record.
    writes = args.sample_log != "none" or "diversity" in args.callbacks
    looks = writes and os.environ.get("RANK", "0") == "0"
    if looks and (reason := reason_against(args.output_dir)):
        yield error(f"output_dir {args.output_dir}", reason)


def next_session(run_dir: RunDir) -> int:
    """Return the number after the last session that left files; 0 if there is none."""
    names = [path.name for table in TABLES for path in table.folder(run_dir).glob("*session-*")]
    matches = [re.match(r"\.?session-(\d+)", name) for name in names]
    return max([int(match[1]) for match in matches if match], default=-1) + 1


def reason_against(run_dir: RunDir) -> str:
    """Return a message about another training that writes to the folder; "" if there is none."""
    for lock in SAMPLES.folder(run_dir).resolve().glob(".session-[0-9]*.lock"):
        if str(lock) not in _held:
            # An exclusive lock asks for a descriptor that may write.
            with suppress(OSError), lock.open("r+") as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):  # systems raise one or the other
                    return (
                        f"{file.read() or 'another process'} trains into it. Two trainings would "
                        "replace each other's files. End that process, or give this training "
                        "another --output_dir. If its machine is gone and the disk still has the "
                        f"lock, remove {lock}."
                    )
    return ""


# --- the writer ---


class SampleLog:
    """Writes the rows of one session in a thread beside the training; for one caller at a time.

    `session` is the number from `claim_session`, `start_step` the optimizer step of the checkpoint
    that the session was resumed from, or 0. `max_bytes` bounds the files of the tables
    `BOUNDED`, earlier sessions included.
    """

    def __init__(
        self, run_dir: RunDir, *, session: int, start_step: int, max_bytes: int | None = None
    ) -> None:
        self._run_dir = Path(run_dir)
        self._session, self._start_step = session, start_step
        self.max_bytes = max_bytes
        self._file_bytes = min(FILE_BYTES, max_bytes // PARTS) if max_bytes else FILE_BYTES
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="sample-log")
        self._unwritten: list[Future[None]] = []
        # Only the writer thread uses the fields below.
        self._num_files = Counter[str]()  # of each table
        # By table, consecutive files that wait to be merged, with their sizes in bytes.
        self._small = defaultdict[str, dict[RecordFile, int]](dict)
        # Rounds that are not on disk: those of the last call, and earlier ones if the disk failed.
        self._waiting: deque[tuple[Table, RoundId, pa.Table]] = deque()
        self._num_lost = 0
        self._is_untidy = False  # whether it has warned that merging or removing fails

    def append(self, rows: Sequence[Row], table: Table = SAMPLES) -> None:
        """Have the thread write rows, a file for each round. Raise `ValueError`, and write nothing,
        if a row's counts disagree or a value does not fit."""
        rounds = rounds_of(rows, table, session=self._session)
        self._unwritten.append(self.writer.submit(self._write, rounds, table))

    def flush(self) -> None:
        """Wait until all rows are on disk, or kept in memory if the disk fails."""
        while self._unwritten:
            self._unwritten.pop(0).result()

    def finish(self) -> None:
        """Write the rounds that wait for the disk, and merge what is left; no rows may follow."""
        self.writer.submit(self._write, [], SAMPLES).result()
        self.writer.submit(self._finish).result()  # after the merges that `_write` submits

    def _finish(self) -> None:
        for files in self._small.values():
            self._tidy([*files])
        if num_lost := self._num_lost + len(self._waiting):
            logger.warning(
                "%d rounds of the run's record are lost: %s could not be written.",
                *(num_lost, self._run_dir),
            )

    def _write(self, rounds: list[tuple[RoundId, pa.Table]], table: Table) -> None:
        """Write a file for each round, and for each round that waits."""
        was_waiting = bool(self._waiting)
        self._waiting.extend((table, *each) for each in rounds)
        try:
            while self._waiting:
                self._write_round(*self._waiting[0])
                self._waiting.popleft()
        except (OSError, pa.ArrowException) as e:
            # A failing disk must not end the training: rounds wait, and are written in order later.
            if not was_waiting:
                logger.warning(
                    "%s: the run's record cannot be written (%s). Rounds wait in memory and are "
                    "tried again with the next one. Beyond %d MiB the oldest are lost. Make room "
                    "there, or correct --output_dir. The training goes on.",
                    *(self._run_dir, e, WAITING_BYTES >> 20),
                )
            excess = sum(rows.nbytes for *_, rows in self._waiting) - WAITING_BYTES
            while excess > 0 and len(self._waiting) > 1:  # the newest round stays, however large
                excess -= self._waiting.popleft()[-1].nbytes
                self._num_lost += 1
        self._tidy([])

    def _write_round(self, table: Table, round_: RoundId, rows: pa.Table) -> None:
        number, small = self._num_files[table.name], self._small[table.name]
        path = table.folder(self._run_dir) / (
            f"session-{self._session:04d}-step-{self._start_step:06d}-"
            f"file-{number:06d}-{round_.phase}-{round_.step:06d}-{round_.number:02d}.parquet"
        )
        size = _write_file(path, rows.schema, [rows])
        self._num_files[table.name] += 1
        is_large = size * LARGE >= self._file_bytes
        if not is_large:
            small[RecordFile(self._session, self._start_step, number, number, path)] = size
        is_much = len(small) >= FILES or sum(small.values()) >= self._file_bytes
        if small and (is_large or is_much):  # merged files follow one another
            del self._small[table.name]
            self.writer.submit(self._tidy, [*small])  # `flush` need not wait for it

    # --- few files, and not too many bytes ---

    def _tidy(self, files: Sequence[RecordFile]) -> None:
        """Merge consecutive files, and remove the oldest beyond the bound."""
        try:
            files = [file for file in files if file.path.exists()]  # the oldest may be gone
            if len(files) > 1:
                self._merge(files)
            self._remove_oldest()
        except (OSError, ValueError, pa.ArrowException) as e:
            if not self._is_untidy:
                logger.warning(
                    "%s: files of the run's record cannot be merged or removed (%s). They are read "
                    "as they are, and --sample_log_gb does not bound them. Let this process remove "
                    "files there.",
                    *(self._run_dir, e),
                )
            self._is_untidy = True

    def _merge(self, files: Sequence[RecordFile]) -> None:
        first, last = files[0], files[-1]
        prefix = first.path.name.partition("-file-")[0]
        path = first.path.with_name(f"{prefix}-files-{first.first:06d}-{last.last:06d}.parquet")
        # Only one file is in memory at a time. A damaged one raises, and nothing is merged: readers
        # leave out a damaged file whole, and with a merged one 64 rounds.
        rounds = (pq.ParquetFile(f.path, page_checksum_verification=True).read() for f in files)
        _write_file(path, pq.read_schema(first.path), rounds)
        for file in files:  # only now: a process that dies earlier loses nothing
            file.path.unlink(missing_ok=True)

    def _remove_oldest(self) -> None:
        """Remove files, of any session, until the others are within the bound."""
        if self.max_bytes is None:
            return
        sizes: dict[RecordFile, int] = {}
        newest: set[RecordFile] = set()
        for table in BOUNDED:
            files = record_files(table.folder(self._run_dir))
            newest |= {*files[-1:]}
            sizes |= {file: file.path.stat().st_size for file in files}
        excess = sum(sizes.values()) - self.max_bytes
        # The newest file of each table always stays, however small the bound.
        for file in sorted(sizes, key=lambda file: (file.session, file.last)):
            if excess > 0 and file not in newest:
                file.path.unlink(missing_ok=True)
                excess -= sizes[file]


def _write_file(path: Path, schema: pa.Schema, rounds: Iterable[pa.Table]) -> int:
    """Write each round as row groups of a file, and return the file's bytes once it is on disk.
    Raise `OSError` if the file may be missing; writing it again does no harm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")  # pandas ignores such names
    try:
        with unfinished.open("wb") as file:
            with pq.ParquetWriter(
                file,
                schema,
                compression="zstd",
                compression_level=ZSTD_LEVEL,
                use_dictionary=DICTIONARY_COLUMNS,
                # The high bytes of numbers compress if they are separate from the low ones.
                use_byte_stream_split=["logprobs.list.element"],
                data_page_size=PAGE_BYTES,
                write_statistics=list(ROUND_COLUMNS),  # for queries by step; more would take 1 KB
                write_page_checksum=True,
                store_schema=False,  # Arrow's schema would take 2 KB
            ) as writer:
                for rows in rounds:
                    writer.write_table(rows, row_group_size=GROUP_ROWS)
            file.flush()
            size = file.tell()
            os.fsync(file.fileno())
        unfinished.replace(path)  # after fsync: a crash must not leave a name without bytes
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # puts the name on disk, too
        finally:
            os.close(folder)
        return size
    except (OSError, ValueError, pa.ArrowException):  # of the disk, or of files that `rounds` reads
        unfinished.unlink(missing_ok=True)
        raise
