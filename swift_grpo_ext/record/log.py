"""Tables of a run's record, written row by row: samples, and how they scored.

Each rank of each session (one start of the trainer) writes files of its own, so that ranks need
not wait for one another:

    RUN_DIR/samples/session-0000-rank-00000.arrows
    RUN_DIR/rewards/session-0000-rank-00000.arrows

A file is an Arrow IPC stream of batches compressed with zstd, each with rows of one round, and with
checksums (`checksums.py`). A row is
on disk when `append` returns: a process that is killed, or a machine that loses power, loses at
most the rows that were being appended. `reader` reads what is there, also while the run goes on.
With a bound, a rank begins another file (`...-part-0001.arrows`) when one holds an eighth of it,
and removes its oldest files beyond it.
Pure: needs pyarrow and numpy.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from swift_grpo_ext.record.checksums import column_checksums, text_checksum
from swift_grpo_ext.record.row import SCHEMA, STORED_SCHEMA, Row, to_batch

ROWS_PER_BATCH = 1024
"""At most; a reader takes so many into memory at a time."""

FILE_NAME = re.compile(r"session-(\d+)-rank-(\d+)(?:-part-(\d+))?\.arrows")

ZSTD_LEVEL = 9
"""A second of the writer's thread for 5 million tokens, and a fifth less than level 1 on disk."""

PARTS = 8
"""Files that a bounded log is kept in."""

CRC32 = "crc32"
"""In a file's header, its checksum: where it stands, each batch has one for each column."""


def header_checksum(metadata: Mapping[str, str]) -> str:
    return text_checksum(" ".join(f"{k}={v}" for k, v in sorted(metadata.items()) if k != CRC32))


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table of a run's record."""

    name: str
    """Of its folder in the run's."""

    version: int
    """Of its columns and their meaning."""

    schema: pa.Schema
    """As readers have it."""

    stored: pa.Schema
    """As the files have it; the same names."""

    older: Mapping[int, pa.Schema] = field(default_factory=dict)
    """Schemas of files of earlier versions that can be read, by version."""

    def folder(self, run_dir: str | os.PathLike[str]) -> Path:
        return Path(run_dir) / self.name


SAMPLES = Table(name="samples", version=3, schema=SCHEMA, stored=STORED_SCHEMA, older={2: SCHEMA})


class SampleLog:
    """Writes the rows of one rank in one session; for one thread at a time."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        session: int,
        start_step: int,
        rank: int,
        table: Table = SAMPLES,
        max_bytes: int | None = None,
    ) -> None:
        """Make the folder; the file is made with the first rows.

        Args:
            session: from `next_session`, the same on all ranks.
            start_step: optimizer step of the checkpoint that the session was resumed from, 0 for a
                run from the beginning; the same on all ranks.
            rank: of the process that writes.
            table: what the rows are.
            max_bytes: of this rank's files, those of earlier sessions included; None for no bound.
                The file that is written is never removed.

        Raises:
            OSError: the folder cannot be made.
        """
        names: dict[str, Any] = {"session": session, "start_step": start_step, "rank": rank}
        self.beside = partial(SampleLog, run_dir, **names)
        """Opens a log of another table (`table=`), for the same rank and session."""

        self.path = table.folder(run_dir) / f"session-{session:04d}-rank-{rank:05d}.arrows"
        metadata = {k: str(v) for k, v in {"version": table.version, **names}.items()}
        metadata[CRC32] = header_checksum(metadata)
        self._schema = table.stored.with_metadata(metadata)
        self._rank, self._max_bytes = rank, max_bytes
        self._closed = False
        self._begin(self.path)
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def _begin(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._buffer = io.BytesIO()
        codec = pa.Codec("zstd", compression_level=ZSTD_LEVEL)
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        self._writer = pa.ipc.new_stream(self._buffer, self._schema, options=options)

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows, and wait until they are on disk. Once writing has failed, the log is closed.

        Raises:
            ValueError: a row's counts disagree or a value does not fit, naming the sample; nothing
                was written. Or the log is closed.
            OSError: the file exists already, or cannot be written; names it.
        """
        if self._closed:
            raise ValueError(f"The sample log {self.path} is closed.")
        batches = [to_batch(chunk, self._schema) for chunk in _chunks(rows)]
        if not batches:
            return
        with self._explained():
            for batch in batches:
                self._writer.write_batch(batch, column_checksums(batch))
            self._flush()
            if self._max_bytes is not None:
                self._stay_within(self._max_bytes)

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

    def _stay_within(self, max_bytes: int) -> None:
        """Begin another file where this one is long enough, and remove the oldest ones."""
        sizes = {path: path.stat().st_size for path in rank_files(self.path.parent, self._rank)}
        if sizes[self.path] * PARTS >= max_bytes:
            self._writer.close()
            self._flush()
            self._end()
            stem, _, part = self.path.stem.partition("-part-")
            self._begin(self.path.with_name(f"{stem}-part-{int(part or 0) + 1:04d}.arrows"))
            self._closed = False
        for path in [*sizes][:-1]:
            if sum(sizes.values()) > max_bytes:
                path.unlink()
                del sizes[path]

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
        except OSError as e:
            self._end()
            words = (
                f"cannot be written ({e.strerror}): make room there, or correct --output_dir, and "
                "resume from the last checkpoint."
            )
            if isinstance(e, FileExistsError):
                words = (
                    "exists already: take the session's number from `next_session`, on one rank, "
                    "before any rank writes; and let no two runs share an --output_dir."
                )
            raise OSError(e.errno, f"The sample log {self.path} {words}") from e


def rank_files(folder: Path, rank: int) -> list[Path]:
    """The files of a rank, the oldest first."""
    named = [(FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    own = [(int(m[1]), int(m[3] or 0), path) for m, path in named if m and int(m[2]) == rank]
    return [path for _, _, path in sorted(own)]


def next_session(run_dir: str | os.PathLike[str]) -> int:
    """The number for a session that starts now: one more than the greatest in the folder, from 0.

    One rank calls it, before any rank has written, and tells the others. A session that ended
    before its first rows left no file; the next session takes its number.
    """
    names = (FILE_NAME.fullmatch(p.name) for p in SAMPLES.folder(run_dir).glob("session-*"))
    return max((int(name[1]) + 1 for name in names if name), default=0)


def _chunks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in their order, divided where the round changes, and after `ROWS_PER_BATCH`."""
    for _, same_round in groupby(rows, key=lambda row: row.sample_id.round):
        chunk = list(same_round)
        for start in range(0, len(chunk), ROWS_PER_BATCH):
            yield chunk[start : start + ROWS_PER_BATCH]
