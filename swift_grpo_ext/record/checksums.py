"""CRC-32 of each column of a batch, which the batch carries as custom metadata. Pure.

Arrow's files have no checksums of their own: a flipped bit of a number is another number. The sum
is over the values, their lengths and which are missing, not over Arrow's buffers, whose padding may
differ; so a reader of some columns checks just these.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa


def column_checksums(batch: pa.RecordBatch) -> dict[str, str]:
    """Of each column, by name: 8 hex digits."""
    return {
        field.name: f"{_crc32(column, 0):08x}"
        for field, column in zip(batch.schema, batch.columns, strict=True)
    }


def check_columns(batch: pa.RecordBatch, written: Mapping[bytes, bytes]) -> None:
    """Raises ValueError, naming columns that are not what was written."""
    found = column_checksums(batch)
    changed = [name for name, crc in found.items() if written.get(name.encode()) != crc.encode()]
    if changed:
        raise ValueError(f"the checksum of {', '.join(changed)} is another")


def text_checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _crc32(column: Any, crc: int) -> int:
    kind = column.type
    if pa.types.is_boolean(kind):  # the rest of its last byte may be anything
        column, kind = column.cast(pa.uint8()), pa.uint8()
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        crc = zlib.crc32(np.packbits(missing).data, crc)
    if pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            crc = _crc32(column.field(i), crc)
        return crc
    if pa.types.is_primitive(kind):
        return zlib.crc32(_head(column.buffers()[1], len(column) * kind.bit_width // 8), crc)
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1)
    crc = zlib.crc32(offsets.data, crc)
    if pa.types.is_string(kind):
        return zlib.crc32(_head(column.buffers()[2], int(offsets[-1])), crc)
    for values in (column.keys, column.items) if pa.types.is_map(kind) else (column.values,):
        crc = _crc32(values, crc)
    return crc


def _head(buffer: pa.Buffer | None, num_bytes: int) -> memoryview:
    return memoryview(buffer or b"")[:num_bytes]
