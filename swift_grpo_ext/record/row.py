"""Defines the tables of a run's record, and the rows of the first: completions. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from swift_grpo_ext.sampling.seeding import SampleId

if TYPE_CHECKING:
    from swift_grpo_ext.record.rewards import RewardRow

ROUND_COLUMNS = ("phase", "step", "number")
SAMPLE_ID_COLUMNS = (*ROUND_COLUMNS, "group", "index", "turn")

LOGPROB_STEPS = 1024
"""Log-probabilities above -1 are rounded to as many steps in a nat, and then all to 16 bits: the
error is at most 0.0005 nats, or 0.05% where that is more. Unrounded they take 10% more room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table of a run's record."""

    name: str
    """The table's folder in the run's folder."""

    schema: pa.Schema

    def folder(self, run_dir: str | os.PathLike[str]) -> Path:
        return Path(run_dir) / self.name


def make_table(name: str, columns: dict[str, pa.DataType], *, nullable: Sequence[str]) -> Table:
    """Return a table with the columns that name a sample and its session, and these."""
    named = {
        **{"session": pa.int32(), "phase": pa.utf8(), "step": pa.int64(), "number": pa.int64()},
        **{"group": pa.int64(), "index": pa.int32()},
        **columns,
    }
    fields = [pa.field(column, kind, column in nullable) for column, kind in named.items()]
    return Table(name=name, schema=pa.schema(fields))


SAMPLES = make_table(
    "samples",
    {
        "turn": pa.int32(),
        "seed": pa.int64(),
        "rank": pa.int32(),
        "replica": pa.utf8(),
        "weight_version": pa.int64(),
        "finish_reason": pa.utf8(),
        "stop_reason": pa.utf8(),
        "num_tokens": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),  # as readers have it; files hold 16 bits
        "text": pa.utf8(),
        "fingerprint": pa.utf8(),
        "prompt": pa.utf8(),
        "media": pa.list_(pa.utf8()),
        "pictures": pa.list_(pa.binary()),
        "mask": pa.list_(pa.bool_()),
        "engine_seconds": pa.float32(),
        "tool_seconds": pa.float32(),
        "columns": pa.utf8(),
    },
    nullable=("seed", "finish_reason", "stop_reason", "logprobs", "pictures", "mask", "columns"),
)


ADDED = ("pictures", "mask", "engine_seconds", "tool_seconds", "columns")
"""Columns that files of version 0.1.0 lack: they are read as null, and as 0 seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One completion; of a conversation, one turn."""

    sample_id: SampleId
    """Its position in the run, which names it."""

    seed: int | None
    """Its sampling seed, 63 bits; None where the engine chose (`--rollout_seed_mode engine`)."""

    rank: int
    """The training rank that the sample belongs to."""

    replica: str
    """The engine that generated it: `rank 0`, `server 1 replica 0`."""

    weight_version: int
    """The number of optimizer steps behind the weights that generated it."""

    finish_reason: str | None
    stop_reason: str | None = None
    """The stop string, or the stop token's id in digits, that ended it; None where none did."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    """The log-probabilities of `token_ids` in nats, kept as `LOGPROB_STEPS` says; None where the
    engine gave none, or with `--sample_log tokens`."""

    text: str
    fingerprint: str
    """The hash of the prompt, media included: 32 hex digits."""

    prompt: str
    """The prompt's messages as JSON; of a later turn, those that came since the turn before."""

    media: Sequence[str]
    """Images, videos and audios of these messages by path or URL; what has none, by the digest of
    its content."""

    pictures: Sequence[bytes | None] | None = None
    """Has a small picture (WebP) for each image without a path among a later turn's `media`,
    and None for the others."""

    mask: Sequence[bool] | None = None
    """Says of each token whether it was trained on; None where all were."""

    engine_seconds: float = 0.0
    """From the request to the answer. A colocated engine answers a round's samples together."""

    tool_seconds: float = 0.0
    """In the scheduler, between the answer before and the request."""

    columns: str | None = None
    """The data row's other columns as JSON, such as `solution`, which reward functions are given;
    None where it has none."""

    @property
    def num_tokens(self) -> int:
        """Raises ValueError where tokens and log-probabilities differ in number."""
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"{self.sample_id}: {len(self.token_ids)} tokens and "
                f"{len(self.logprobs)} log-probabilities."
            )
        return len(self.token_ids)


def to_arrow(rows: Sequence[SampleRow | RewardRow], table: Table, *, session: int) -> pa.Table:
    """Return rows as the files hold them: with log-probabilities in 16 bits.

    A row has an attribute for each column of its table.

    Raises:
        ValueError: a row's counts disagree, naming the sample; or a value does not fit its column.
    """
    columns, fields = [], []
    values: list[Any]
    for field in table.schema:
        if field.name == "session":
            values = [session] * len(rows)
        elif field.name in SAMPLE_ID_COLUMNS:
            values = [getattr(row.sample_id, field.name) for row in rows]
        else:
            values = [getattr(row, field.name) for row in rows]
        if field.name == "logprobs":
            values = [lp if lp is None else _rounded(lp) for lp in values]
            field = field.with_type(pa.list_(pa.float16()))
        columns.append(pa.array(values, field.type))
        fields.append(field)
    return pa.table(columns, schema=pa.schema(fields))


def _rounded(logprobs: Sequence[float]) -> np.ndarray:
    values = np.asarray(logprobs, np.float32)
    steps = np.rint(values * LOGPROB_STEPS) / LOGPROB_STEPS
    with np.errstate(over="ignore"):  # below -65504, 16 bits hold -inf
        return np.where(values > -1, steps, values).astype(np.float16)


def to_rows(table: pa.Table) -> list[SampleRow]:
    """Return the rows of a table with all columns of `SAMPLES`."""
    rows = []
    for values in table.drop_columns(["session", "num_tokens"]).to_pylist():
        sample_id = SampleId(**{name: values.pop(name) for name in SAMPLE_ID_COLUMNS})
        rows.append(SampleRow(sample_id=sample_id, **values))
    return rows
