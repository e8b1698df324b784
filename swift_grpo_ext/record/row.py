"""One row of the sample log: what it keeps of a completion, as which Arrow types. Pure.

It keeps text that UTF-8 cannot hold (a lone half of a surrogate pair) as its escape, `\\ud83d`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from swift_grpo_ext.sampling.seeding import SampleId

MEDIA = ("images", "videos", "audios")
LONGEST_NAME = 2048
"""Characters; what is longer is content, not a path or a URL."""

ROUND_COLUMNS = ("phase", "step", "number")
SAMPLE_ID_COLUMNS = (*ROUND_COLUMNS, "group", "index", "turn")


def make_schema(columns: dict[str, pa.DataType], *, nullable: Sequence[str]) -> pa.Schema:
    """Of these columns, in their order."""
    fields = (pa.field(name, kind, name in nullable) for name, kind in columns.items())
    return pa.schema(fields)


SAMPLE_TYPES = {
    **{"phase": pa.utf8(), "step": pa.int64(), "number": pa.int64()},
    **{"group": pa.int64(), "index": pa.int32()},
}
"""Columns of every table."""

SCHEMA = make_schema(
    {
        **SAMPLE_TYPES,
        "turn": pa.int32(),
        "seed": pa.int64(),
        "rank": pa.int32(),
        "replica": pa.utf8(),
        "weight_version": pa.int64(),
        "finish_reason": pa.utf8(),
        "stop_reason": pa.utf8(),
        "num_tokens": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "text": pa.utf8(),
        "fingerprint": pa.utf8(),
        "prompt": pa.utf8(),
        "media": pa.list_(pa.utf8()),
    },
    nullable=("seed", "finish_reason", "stop_reason", "logprobs"),
)
HALVES = pa.list_(
    pa.struct([pa.field("high", pa.uint8(), False), pa.field("low", pa.uint8(), False)])
)
"""Floats of 16 bits, their bytes apart: the high ones differ little, and so compress well."""

STORED_SCHEMA = SCHEMA.set(SCHEMA.get_field_index("logprobs"), pa.field("logprobs", HALVES))
"""Of the files."""

LOGPROB_STEPS = 1024
"""In a nat: log-probabilities are rounded to them, and to 16 bits. The error is at most 0.0005
nats, or 0.05% where that is more."""

PACKED = {pa.list_(pa.int32()): ("i", np.int32), HALVES: ("f", np.float32)}
"""How `struct` and numpy call the numbers of lists."""
MISFIT = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""What pyarrow raises for a value that does not fit its column."""


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
    """Of `token_ids`, in nats, kept as `LOGPROB_STEPS` says; None where the engine gave none, or
    with `--sample_log tokens`."""

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
    is_id = field.name in SAMPLE_ID_COLUMNS
    values = [getattr(row.sample_id if is_id else row, field.name) for row in rows]
    try:
        return _checked_array(values, field)
    except MISFIT:
        fitting = [_fitting_value(*pair, field) for pair in zip(rows, values, strict=True)]
        return _checked_array(fitting, field)


def _checked_array(values: list[Any], field: pa.Field) -> pa.Array:
    column = _lists_of_numbers(values, field.type) if field.type in PACKED else None
    if column is None:
        column = pa.array(values, pa.list_(pa.float32()) if field.type == HALVES else field.type)
    is_list = pa.types.is_list(field.type)
    if (column.null_count and not field.nullable) or (is_list and column.values.null_count):
        raise ValueError("None is not allowed")
    return column


def _lists_of_numbers(values: list[Any], kind: pa.DataType) -> pa.ListArray | None:
    """The fast way, which does not look at each number; None if that is needed."""
    code, dtype = PACKED[kind]
    lists = [v.tolist() if isinstance(v, np.ndarray) else () if v is None else v for v in values]
    try:
        packed = b"".join(struct.pack(f"{len(numbers)}{code}", *numbers) for numbers in lists)
    except (struct.error, OverflowError, TypeError):
        return None
    flat = np.frombuffer(packed, dtype)
    offsets = pa.array(np.cumsum([0, *map(len, lists)]), pa.int32())
    mask = pa.array([value is None for value in values])
    items = _split_halves(flat) if kind == HALVES else pa.array(flat)
    return pa.ListArray.from_arrays(offsets, items, mask=mask)


def _split_halves(logprobs: np.ndarray[Any, Any]) -> pa.StructArray:
    # From 1 on, 16 bits have no finer steps.
    steps = np.rint(logprobs * np.float32(LOGPROB_STEPS)) / np.float32(LOGPROB_STEPS)
    with np.errstate(over="ignore"):  # what 16 bits cannot hold is infinite
        rounded = np.where(logprobs > -1, steps, logprobs).astype(np.float16)
    halves = rounded.view(np.uint8).reshape(-1, 2)
    low, high = (pa.array(halves[:, i]) for i in (0, 1))
    return pa.StructArray.from_arrays([high, low], fields=list(HALVES.value_type))


def join_halves(lists: pa.ListArray) -> pa.ListArray:
    """`HALVES` as lists of float32."""
    high, low = (half.to_numpy().astype(np.uint16) for half in lists.values.flatten())
    values = (high << 8 | low).view(np.float16).astype(np.float32)
    return pa.ListArray.from_arrays(lists.offsets, pa.array(values), mask=lists.is_null())


def _fitting_value(row: Row, value: Any, field: pa.Field) -> Any:
    value = _escape_surrogates(value)
    try:
        _checked_array([value], field)
    except MISFIT as e:
        raise ValueError(
            f"{row.sample_id}: {field.name} {value!r:.200} does not fit {field.type} ({e})."
        ) from e
    return value


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
    return [*map(_escape_surrogates, value)] if isinstance(value, (list, tuple)) else value


# --- from what a rollout returned ---


def sample_row(
    sample_id: SampleId,
    sample: Any,
    output: Any,
    *,
    seed: int | None,
    fingerprint: str,
    rank: int,
    weight_version: int,
) -> SampleRow:
    """One completion, as it was drawn.

    Args:
        sample: ms-swift's sample, or the request of a later turn, with messages and media.
        output: ms-swift's `RolloutOutput` for it. All turns of a conversation that a server led are
            one completion.
        fingerprint: of the prompt.
        rank: the training rank that owns the sample.
        weight_version: optimizer steps behind the weights that drew it.
    """
    choice = output.response.choices[0]
    token_ids = list(chain(*output.response_token_ids)) or list(choice.token_ids or ())
    logprobs = _logprobs(output, choice)
    stop_reason = output.rollout_infos.get("stop_reason")
    return SampleRow(
        sample_id=sample_id,
        seed=seed,
        rank=rank,
        replica=str(output.rollout_infos.get("replica", "")),
        weight_version=weight_version,
        finish_reason=choice.finish_reason,
        stop_reason=None if stop_reason is None else str(stop_reason),
        token_ids=token_ids,
        # A conversation's tokens include those that the environment put between the turns.
        logprobs=logprobs if logprobs and len(logprobs) == len(token_ids) else None,
        text=choice.message.content if isinstance(choice.message.content, str) else "",
        fingerprint=fingerprint,
        prompt=json.dumps(sample.messages, ensure_ascii=False, default=repr),
        media=[name for kind in MEDIA for name in map(media_name, getattr(sample, kind) or ())],
    )


def _logprobs(output: Any, choice: Any) -> list[float] | None:
    if output.rollout_logprobs:
        return list(chain(*output.rollout_logprobs))
    content: Sequence[Any] = (choice.logprobs or {}).get("content") or ()
    return [token["logprob"] for token in content] or None


def media_name(media: Any) -> str:
    """A path or URL as it is; of content or pixels, a digest; of frames, the frames' names."""
    if isinstance(media, dict):
        media = media.get("path") or media.get("bytes")
    if isinstance(media, str) and len(media) <= LONGEST_NAME:
        return media
    if isinstance(media, (list, tuple)):
        return " ".join(map(media_name, media))
    if isinstance(media, str):
        media = media.encode()
    if hasattr(media, "tobytes"):  # a PIL image, an array; its `repr` holds its address or is cut
        form = [getattr(media, name, None) for name in ("mode", "size", "shape", "dtype")]
        media = repr(form).encode() + media.tobytes()
    content = media if isinstance(media, bytes) else repr(media).encode()
    return f"blake2b:{hashlib.blake2b(content, digest_size=16).hexdigest()}"
