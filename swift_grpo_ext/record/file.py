"""One file of the sample log, as far as it is whole. Pure.

A file is read up to its last whole batch: what follows was being written when its writer was
killed, or is being written now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from swift_grpo_ext.record.log import VERSION
from swift_grpo_ext.record.row import ROUND_COLUMNS, SCHEMA


class RoundName(NamedTuple):
    """Which round; sorts as tables of samples do."""

    phase: str
    step: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBatch:
    """Where a file holds rows of one round."""

    path: Path
    session: int
    round: RoundName
    offset: int
    size: int
    """Bytes."""

    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """What one rank wrote in one session."""

    path: Path
    session: int
    start_step: int
    batches: list[StoredBatch]
    num_unread_bytes: int
    """Behind the last whole batch."""


def scan_file(path: Path) -> StoredFile | None:
    """Find the batches of a file; None where not even its schema was written.

    Raises:
        ValueError: another version of swift-grpo-ext wrote it, or it is damaged.
    """
    with pa.memory_map(str(path)) as source:
        ends, whole = _message_ends(source)
        if not ends:
            return None
        source.seek(0)
        reader = pa.ipc.open_stream(source, options=_only(ROUND_COLUMNS))
        session, start_step = _check_header(path, reader.schema.metadata)
        batches = []
        for offset, end in pairwise(ends):
            batch = _next_batch(reader, path, offset)
            batches.append(
                StoredBatch(
                    path=path,
                    session=session,
                    round=RoundName(*(batch[column][0].as_py() for column in ROUND_COLUMNS)),
                    offset=offset,
                    size=end - offset,
                    num_rows=batch.num_rows,
                )
            )
        return StoredFile(
            path=path,
            session=session,
            start_step=start_step,
            batches=batches,
            num_unread_bytes=source.size() - whole,
        )


def read_batches(batches: Sequence[StoredBatch], columns: Iterable[str]) -> list[pa.RecordBatch]:
    """Some columns of each batch, in the order of `SCHEMA`; touches no others in the files.

    Raises:
        ValueError: a batch is damaged; names the file.
    """
    options = _only(columns)
    numbers_of: dict[Path, list[int]] = defaultdict(list)
    for number, batch in enumerate(batches):
        numbers_of[batch.path].append(number)
    read: dict[int, pa.RecordBatch] = {}
    for path, numbers in numbers_of.items():
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_stream(source, options=options)
            for number in numbers:
                offset, size = batches[number].offset, batches[number].size
                source.seek(offset)
                read[number] = _next_batch(reader, path, offset).replace_schema_metadata()
                assert source.tell() == offset + size, f"pyarrow {pa.__version__} reads ahead"
    return [read[number] for number in range(len(batches))]


def _message_ends(source: pa.NativeFile) -> tuple[list[int], int]:
    """Where the whole messages of a stream end: its schema, then its batches. And where what is
    whole ends, the mark of the stream's end included."""
    ends: list[int] = []
    while True:
        try:
            pa.ipc.read_message(source)
        except EOFError:
            return ends, source.tell()
        except (OSError, pa.ArrowInvalid):
            return ends, ends[-1] if ends else 0
        ends.append(source.tell())


def _check_header(path: Path, metadata: dict[bytes, bytes]) -> tuple[int, int]:
    """Session and start step."""
    version = int(metadata[b"version"])
    if version != VERSION:
        raise ValueError(
            f"{path} is of version {version} of the sample log, and this swift-grpo-ext reads "
            f"{VERSION}: use the version of swift-grpo-ext that wrote it."
        )
    return int(metadata[b"session"]), int(metadata[b"start_step"])


def _next_batch(reader: pa.RecordBatchReader, path: Path, offset: int) -> pa.RecordBatch:
    try:
        batch = reader.read_next_batch()
        batch.validate(full=True)
    except (pa.ArrowException, OSError) as e:
        raise ValueError(
            f"The sample log {path} is damaged from byte {offset} on ({e}): restore it, or keep "
            f"what precedes, with `truncate --size={offset}`."
        ) from e
    return batch


def _only(columns: Iterable[str]) -> pa.ipc.IpcReadOptions:
    indices = sorted(SCHEMA.get_field_index(name) for name in columns)
    return pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
