"""The sample log: every completion of a run, once, with its place and what it was drawn with.

Each rank of each session (one start of the trainer) writes a file of its own, so that ranks need
not wait for one another:

    RUN_DIR/samples/session-0000-rank-00000.arrows

an Arrow IPC stream of batches compressed with zstd, each of rows of one round. A row is on disk
when `append` returns: a process that is killed, or a machine that loses power, loses at most the
rows that were being appended. `reader` reads what is there, also while the run goes on.
Pure: needs pyarrow and numpy.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from swift_grpo_ext.record.row import SCHEMA, SampleRow, to_batch

VERSION = 2
ROWS_PER_BATCH = 1024
"""At most; what a reader takes into memory at a time."""

FILE_NAME = re.compile(r"session-(\d+)-rank-(\d+)\.arrows")


class SampleLog:
    """Writes the samples of one rank in one session; for one thread at a time."""

    def __init__(
        self, run_dir: str | os.PathLike[str], *, session: int, start_step: int, rank: int
    ) -> None:
        """Make the folder; the file is made with the first rows.

        Args:
            session: from `next_session`, the same on all ranks.
            start_step: optimizer step of the checkpoint that the session was resumed from, 0 for a
                run from the beginning; the same on all ranks.
            rank: of the process that writes.

        Raises:
            OSError: the folder cannot be made.
        """
        self.path = samples_folder(run_dir) / f"session-{session:04d}-rank-{rank:05d}.arrows"
        metadata = {"version": VERSION, "session": session, "start_step": start_step, "rank": rank}
        self._schema = SCHEMA.with_metadata({key: str(value) for key, value in metadata.items()})
        self._buffer = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        self._writer = pa.ipc.new_stream(self._buffer, self._schema, options=options)
        self._file: io.FileIO | None = None
        self._closed = False
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, rows: Sequence[SampleRow]) -> None:
        """Write rows, and wait until they are on disk. Once writing has failed, the log is closed.

        Raises:
            ValueError: a row's counts disagree or a value does not fit, naming the sample; nothing
                was written. Or the log is closed.
            OSError: the file exists already, or cannot be written; names it.
        """
        if self._closed:
            raise ValueError(f"The sample log {self.path} is closed.")
        batches = [to_batch(part, self._schema) for part in _parts(rows)]
        if not batches:
            return
        with self._explained():
            for batch in batches:
                self._writer.write_batch(batch)
            self._flush()

    def close(self) -> None:
        """End the file; again is harmless.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is not None and not self._closed:
            with self._explained():
                self._writer.close()
                self._flush()
        self._end()

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        if self._file is None:
            self._file = io.FileIO(self.path, "xb")
        unwritten = memoryview(self._buffer.getvalue())
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]
        os.fsync(self._file.fileno())
        self._buffer.seek(0)
        self._buffer.truncate()

    def _end(self) -> None:
        self._closed = True
        if self._file is not None:
            self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Name file and remedy where writing fails. Nothing may follow a batch that was cut off, as
        it would be read as the rest of it: the log is closed."""
        try:
            yield
        except FileExistsError as e:
            self._end()
            raise FileExistsError(
                e.errno,
                f"The sample log {self.path} exists already: take the session's number from "
                "`next_session`, on one rank, before any rank writes; and let no two runs share an "
                "--output_dir.",
            ) from e
        except OSError as e:
            self._end()
            raise OSError(
                e.errno,
                f"The sample log {self.path} cannot be written ({e.strerror}): make room there, or "
                "correct --output_dir, and resume from the last checkpoint.",
            ) from e


def samples_folder(run_dir: str | os.PathLike[str]) -> Path:
    return Path(run_dir) / "samples"


def next_session(run_dir: str | os.PathLike[str]) -> int:
    """The number for a session that starts now: one more than the greatest in the folder, from 0.

    One rank asks, before any rank has written, and tells the others. A session that ended before
    its first rows left no file, and its number is taken again.
    """
    names = (FILE_NAME.fullmatch(path.name) for path in samples_folder(run_dir).glob("session-*"))
    return max((int(name[1]) + 1 for name in names if name), default=0)


def _parts(rows: Sequence[SampleRow]) -> Iterator[list[SampleRow]]:
    """Rows in their order, cut where the round changes, and after `ROWS_PER_BATCH`."""
    for _, same_round in groupby(
        rows, key=lambda row: (row.sample_id.phase, row.sample_id.step, row.sample_id.number)
    ):
        part = list(same_round)
        for start in range(0, len(part), ROWS_PER_BATCH):
            yield part[start : start + ROWS_PER_BATCH]
