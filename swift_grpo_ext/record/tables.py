"""The three tables of a run's record, and their rows. Pure.

`samples` has a row for each completion, `rewards` one for each sample's score, `diversity` one for
the monitor's measurements of a round. docs/internals.md explains each column.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from swift_grpo_ext.sampling.seeding import RoundId, SampleId

RunDir: TypeAlias = "str | os.PathLike[str]"  # a training's folder

ROUND_COLUMNS = ("phase", "step", "number")
SAMPLE_ID_COLUMNS = (*ROUND_COLUMNS, "group", "index", "turn")

# Log-probabilities are rounded to 1/512 nat: the error is at most 0.001 nats. Rounded values
# compress as well as numbers of 16 bits, which DuckDB does not read (docs/benchmarks.md).
LOGPROB_STEPS = 512

# The type of a row's field gives the type of its column. A field that may be None is nullable.
Int32 = Annotated[int, pa.int32()]
Int64 = Annotated[int, pa.int64()]
Float32 = Annotated[float, pa.float32()]
Float64 = Annotated[float, pa.float64()]
Text = Annotated[str, pa.utf8()]
Flag = Annotated[bool, pa.bool_()]

Fate = Literal["trained", "dropped", "evaluated"]

VERDICTS = ("broken", "collapse", "unknown", "healthy")  # of a round, the worst first


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One completion, or one turn of a conversation."""

    sample_id: SampleId
    seed: Int64 | None  # 63 bits; None if the engine chose it (`--rollout_seed_mode engine`)
    rank: Int32  # the training rank that the sample belongs to
    replica: Text  # the engine that generated it: `rank 0`, `server 1 replica 0`
    weight_version: Int64  # the number of optimizer steps done on the weights that generated it
    finish_reason: Text | None
    stop_reason: Text | None = None  # the stop string, or the stop token's id in digits
    token_ids: Annotated[Sequence[int], pa.list_(pa.int32())]
    # Nats, rounded (`LOGPROB_STEPS`); None if the engine gave none, or with `--sample_log tokens`.
    logprobs: Annotated[Sequence[float], pa.list_(pa.float32())] | None
    text: Text
    fingerprint: Text  # the hash of the prompt, media included: 32 hex digits
    prompt: Text  # the messages as JSON; a later turn has those since the turn before
    # The media of these messages: paths, URLs, or digests of content that has neither.
    media: Annotated[Sequence[str], pa.list_(pa.utf8())]
    # Small WebP copies of the images in a later turn's `media` that have no path.
    pictures: Annotated[Sequence[bytes | None], pa.list_(pa.binary())] | None = None
    # Whether each token is trained on; None if all are.
    mask: Annotated[Sequence[bool], pa.list_(pa.bool_())] | None = None
    # From the request to the answer. A colocated engine answers a round's samples together.
    engine_seconds: Float32 = 0.0
    tool_seconds: Float32 = 0.0  # in the scheduler, between the previous answer and this request
    columns: Text | None = None  # the data row's other columns as JSON, such as `solution`

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens. Raise `ValueError` if log-probabilities differ in number."""
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"{self.sample_id}: {len(self.token_ids)} tokens and "
                f"{len(self.logprobs)} log-probabilities."
            )
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRow:
    """The score of one sample, and its fate."""

    sample_id: SampleId  # all turns of a conversation share one score
    # The weighted sum of the functions' values, before the KL term of `--kl_in_reward`; None if
    # no function gave a value.
    reward: Float32 | None
    # The functions' names and values.
    rewards: Annotated[Sequence[tuple[str, float | None]], pa.map_(pa.utf8(), pa.float32())]
    advantage: Float32 | None = None  # None if the sample was dropped
    # Nats between the tokens' log-probabilities in training and rollout; None if one is unknown.
    gap_mean: Float32 | None = None
    gap_max: Float32 | None = None
    truncated: Flag  # whether the length limit ended the completion
    replaced: Flag  # whether its prompt replaced one that could not be encoded
    # Positions and gaps of tokens with a gap of `rewards.SHOWN_GAP` or more. None if positions are
    # unknown, as in conversations that hold tokens of the environment.
    gaps: Annotated[Sequence[tuple[int, float]], pa.map_(pa.int32(), pa.float32())] | None = None
    fate: Annotated[Fate, pa.utf8()]  # `dropped`: dynamic sampling left it out


@dataclass(kw_only=True, slots=True)  # not frozen: the analyzer adds the alarm
class DiversityRow:
    """The monitor's measurements of one round; an evaluation has a row for each of its batches."""

    round: RoundId
    num_samples: Int64
    num_groups: Int64
    verdict: Text  # one of `VERDICTS` (see `diversity.analyzer`)
    log10_p: Float64  # log10 of the collision test's corrected p-value; 0 if nothing was tested
    shared_bits: Float64
    num_pairs: Int64
    num_earlier_pairs: Int64
    num_untested: Int64
    metrics: Annotated[dict[str, float], pa.map_(pa.utf8(), pa.float64())]
    # As JSON (see `diversity.analyzer`).
    collisions: Annotated[list[dict[str, Any]], pa.utf8()] = field(default_factory=list)
    # Numbers of groups: first those with collisions, then those with copies.
    worst_groups: Annotated[list[int], pa.list_(pa.int64())] = field(default_factory=list)
    remedy: Text = ""  # a key of `diversity/words.json`; empty without an alarm
    alarm: Text | None = None  # the alarm's text; None without an alarm

    @property
    def steps_done(self) -> int:
        """Return the optimizer step at which ms-swift logs the round."""
        # A training round that begins at step s is logged with s + 1, an evaluation at s with s.
        return self.round.step + (self.round.phase == "train")

    def scalars(self) -> dict[str, float]:
        """Return the values for `logging.jsonl` and the reporters, by name."""
        return {
            **{f"diversity/{name}": value for name, value in self.metrics.items()},
            "diversity/log10_p": self.log10_p,
            "diversity/shared_bits": self.shared_bits,
            "diversity/broken": float(bool(self.alarm) and self.verdict == "broken"),
            "diversity/collapse": float(bool(self.alarm) and self.verdict == "collapse"),
        }


Row: TypeAlias = SampleRow | RewardRow | DiversityRow


class Table(NamedTuple):
    """One table of a run's record."""

    name: str  # also that of its folder in the run's folder
    schema: pa.Schema

    def folder(self, run_dir: RunDir) -> Path:
        return Path(run_dir) / self.name


def make_table(name: str, row_type: type[Row], **more: pa.DataType) -> Table:
    """Return a table with columns for the session and the round, `more`, and the row's fields."""
    named = {"session": pa.int32(), "phase": pa.utf8(), "step": pa.int64(), "number": pa.int64()}
    fields = [pa.field(column, kind, False) for column, kind in (named | more).items()]
    for column, hint in get_type_hints(row_type, include_extras=True).items():
        is_nullable = type(None) in get_args(hint)
        kind = getattr(get_args(hint)[0] if is_nullable else hint, "__metadata__", ())
        fields += [pa.field(column, kind[0], is_nullable)] if kind else []
    return Table(name=name, schema=pa.schema(fields))


_SAMPLE = {"group": pa.int64(), "index": pa.int32()}
SAMPLES = make_table("samples", SampleRow, **_SAMPLE, turn=pa.int32(), num_tokens=pa.int32())
REWARDS = make_table("rewards", RewardRow, **_SAMPLE)
DIVERSITY = make_table("diversity", DiversityRow)
TABLES = (SAMPLES, REWARDS, DIVERSITY)


# --- rows to columns, and back ---


def rounds_of(rows: Iterable[Row], table: Table, *, session: int) -> list[tuple[RoundId, pa.Table]]:
    """Return each round with its rows as a file holds them. Raise `ValueError` if a sample's counts
    disagree, or a value does not fit its column."""
    rounds: dict[RoundId, list[Row]] = {}
    for row in rows:
        name = row.round if isinstance(row, DiversityRow) else row.sample_id.round
        rounds.setdefault(name, []).append(row)
    return [(name, _to_arrow(found, table, session)) for name, found in rounds.items()]


def _to_arrow(rows: Sequence[Row], table: Table, session: int) -> pa.Table:
    names = [row.round if isinstance(row, DiversityRow) else row.sample_id for row in rows]
    arrays = []
    for column in table.schema:
        values: Sequence[Any]
        if column.name == "session":
            values = [session] * len(rows)
        elif column.name in SAMPLE_ID_COLUMNS:
            values = [getattr(name, column.name) for name in names]
        else:
            values = [getattr(row, column.name) for row in rows]  # `num_tokens` checks the counts
        if column.name == "logprobs":
            values = [None if lp is None else _rounded(lp) for lp in values]
        elif column.name == "collisions":
            values = [json.dumps(each, ensure_ascii=False) for each in values]
        elif column.name == "metrics":
            values = [list(metrics.items()) for metrics in values]
        arrays.append(pa.array(values, column.type))
    return pa.table(arrays, schema=table.schema)


def _rounded(logprobs: Sequence[float]) -> NDArray[np.floating[Any]]:
    # Beyond 2^15 nats, float32 is coarser than a step.
    return np.rint(np.asarray(logprobs, np.float32) * LOGPROB_STEPS) / LOGPROB_STEPS


def to_rows(table: pa.Table) -> list[SampleRow]:
    """Return the samples of a table that has all columns of `SAMPLES`."""
    rows = []
    for values in table.drop_columns(["session", "num_tokens"]).to_pylist():
        sample_id = SampleId(**{name: values.pop(name) for name in SAMPLE_ID_COLUMNS})
        rows.append(SampleRow(sample_id=sample_id, **values))
    return rows
