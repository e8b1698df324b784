"""One row of the sample log: what it keeps of a completion, as which Arrow types. Pure.

It keeps text that UTF-8 cannot hold (a lone half of a surrogate pair) as its escape, `\\ud83d`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from swift_grpo_ext.sampling.seeding import SampleId

ROUND_COLUMNS = ("phase", "step", "number")
SAMPLE_ID_COLUMNS = (*ROUND_COLUMNS, "group", "index", "turn")

SCHEMA = pa.schema(
    [
        pa.field("phase", pa.utf8(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("seed", pa.int64()),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("replica", pa.utf8(), nullable=False),
        pa.field("weight_version", pa.int64(), nullable=False),
        pa.field("finish_reason", pa.utf8()),
        pa.field("stop_reason", pa.utf8()),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("text", pa.utf8(), nullable=False),
        pa.field("fingerprint", pa.utf8(), nullable=False),
        pa.field("prompt", pa.utf8(), nullable=False),
        pa.field("media", pa.list_(pa.utf8()), nullable=False),
    ]
)


class Row(Protocol):
    """A sample's name, and a property for each further column of a table."""

    @property
    def sample_id(self) -> SampleId: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One completion."""

    sample_id: SampleId
    """Its position in the run, which names it."""

    seed: int | None
    """Its sampling seed, 63 bits; None where the engine chose (`--rollout_seed_mode engine`)."""

    rank: int
    """Training rank that the sample belongs to."""

    replica: str
    """The engine that drew it: `rank 0`, `server 1 replica 0`."""

    weight_version: int
    """Optimizer steps behind the weights that drew it."""

    finish_reason: str | None
    stop_reason: str | None = None
    """What ended it: the stop string, or the stop token's id in digits; None where nothing did."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    """Of `token_ids`, in nats, kept in 32 bits; None where the engine gave none."""

    text: str
    fingerprint: str
    """Of the prompt, media included: 32 hex digits (`groups.fingerprint`)."""

    prompt: str
    """The prompt's text."""

    media: Sequence[str]
    """The prompt's images, videos and audios by path or URL, never by content."""

    @property
    def num_tokens(self) -> int:
        """Raises ValueError where tokens and log-probabilities differ in number."""
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"{self.sample_id}: {len(self.token_ids)} tokens and "
                f"{len(self.logprobs)} log-probabilities."
            )
        return len(self.token_ids)


def to_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as a record batch.

    Args:
        schema: its names are columns of `SampleId` or properties of the rows.

    Raises:
        ValueError: a row's counts disagree, or a value does not fit; names the sample.
    """
    return pa.record_batch([_to_array(rows, field) for field in schema], schema=schema)


def to_rows(table: pa.Table) -> list[SampleRow]:
    """The rows of a table with all columns."""
    rows = []
    for values in table.to_pylist():
        sample_id = SampleId(**{name: values.pop(name) for name in SAMPLE_ID_COLUMNS})
        del values["num_tokens"]
        rows.append(SampleRow(sample_id=sample_id, **values))
    return rows


def _to_array(rows: Sequence[Row], field: pa.Field) -> pa.Array:
    values = [_value(row, field.name) for row in rows]
    try:
        return _checked_array(values, field)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _checked_array([_fitting_value(row, field) for row in rows], field)


def _value(row: Row, name: str) -> Any:
    return getattr(row.sample_id if name in SAMPLE_ID_COLUMNS else row, name)


def _checked_array(values: list[Any], field: pa.Field) -> pa.Array:
    array = pa.array(values, field.type)
    is_list = pa.types.is_list(field.type)
    if (array.null_count and not field.nullable) or (is_list and array.values.null_count):
        raise ValueError("None is not allowed")
    return array


def _fitting_value(row: Row, field: pa.Field) -> Any:
    value = _escape_surrogates(_value(row, field.name))
    try:
        _checked_array([value], field)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as e:
        raise ValueError(
            f"{row.sample_id}: {field.name} {value!r:.200} does not fit {field.type} ({e})."
        ) from e
    return value


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
    if isinstance(value, (list, tuple)):
        return [_escape_surrogates(item) for item in value]
    return value
