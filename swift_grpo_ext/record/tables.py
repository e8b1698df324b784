"""Defines the three tables of a run's record and their rows. Pure.

`samples` has a row for each completion, `rewards` one for how each sample scored, `diversity` one
for what the monitor measured in each round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from swift_grpo_ext.sampling.seeding import RoundId, SampleId

ROUND_COLUMNS = ("phase", "step", "number")
SAMPLE_ID_COLUMNS = (*ROUND_COLUMNS, "group", "index", "turn")

LOGPROB_STEPS = 512
"""Log-probabilities are rounded to as many steps in a nat: the error is at most 0.001 nats. They
compress as well as numbers of 16 bits do, which DuckDB does not read (docs/benchmarks.md)."""

Numbers: TypeAlias = Sequence[Any] | NDArray[Any]

Fate = Literal["trained", "dropped", "evaluated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table of a run's record."""

    name: str
    """The table's folder in the run's folder."""

    schema: pa.Schema

    def folder(self, run_dir: str | os.PathLike[str]) -> Path:
        return Path(run_dir) / self.name


def make_table(name: str, columns: dict[str, pa.DataType], *, nullable: Sequence[str]) -> Table:
    """Return a table with the columns that name a session and its round, and these."""
    named = {"session": pa.int32(), "phase": pa.utf8(), "step": pa.int64(), "number": pa.int64()}
    fields = [
        pa.field(column, kind, column in nullable) for column, kind in (named | columns).items()
    ]
    return Table(name=name, schema=pa.schema(fields))


SAMPLES = make_table(
    "samples",
    {
        "group": pa.int64(),
        "index": pa.int32(),
        "turn": pa.int32(),
        "seed": pa.int64(),
        "rank": pa.int32(),
        "replica": pa.utf8(),
        "weight_version": pa.int64(),
        "finish_reason": pa.utf8(),
        "stop_reason": pa.utf8(),
        "num_tokens": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),  # in `LOGPROB_STEPS`
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

REWARDS = make_table(
    "rewards",
    {
        "group": pa.int64(),
        "index": pa.int32(),
        "reward": pa.float32(),
        "rewards": pa.map_(pa.utf8(), pa.float32()),
        "advantage": pa.float32(),
        "gap_mean": pa.float32(),
        "gap_max": pa.float32(),
        "truncated": pa.bool_(),
        "replaced": pa.bool_(),
        "fate": pa.utf8(),
        "gaps": pa.map_(pa.int32(), pa.float32()),
    },
    nullable=("reward", "advantage", "gap_mean", "gap_max", "gaps"),
)

DIVERSITY = make_table(
    "diversity",
    {
        "num_samples": pa.int64(),
        "num_groups": pa.int64(),
        "verdict": pa.utf8(),
        "log10_p": pa.float64(),
        "shared_bits": pa.float64(),
        "num_pairs": pa.int64(),
        "num_earlier_pairs": pa.int64(),
        "num_untested": pa.int64(),
        "metrics": pa.map_(pa.utf8(), pa.float64()),
        "collisions": pa.utf8(),  # JSON
        "worst_groups": pa.list_(pa.int64()),
        "remedy": pa.utf8(),
        "alarm": pa.utf8(),
    },
    nullable=("alarm",),
)

TABLES = (SAMPLES, REWARDS, DIVERSITY)

VERDICTS = ("broken", "collapse", "unknown", "healthy")
"""On a round, the worst first."""


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

    token_ids: Numbers
    logprobs: Numbers | None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRow:
    """Says how one sample scored, and what became of it."""

    sample_id: SampleId
    """Its name; all turns of a conversation share one score."""

    reward: float | None
    """The sum of the functions' values, weighted by `--reward_weights`, before the KL term of
    `--kl_in_reward`; None where no function gave a value."""

    rewards: Sequence[tuple[str, float | None]]
    """Each reward function's name and value; None where it gave none."""

    advantage: float | None = None
    """None where the sample was dropped."""

    gap_mean: float | None = None
    """The mean |training - rollout| log-probability over the completion's tokens, in nats; None
    where one of the two is unknown, and where the sample was dropped."""

    gap_max: float | None = None
    """The largest of these, in nats."""

    truncated: bool
    """True if the length limit ended the completion."""

    replaced: bool
    """True if its prompt replaced one that could not be encoded."""

    gaps: Sequence[tuple[int, float]] | None = None
    """Position in the completion and gap in nats of the tokens whose gap is at least
    `rewards.SHOWN_GAP`; None where gaps are unknown, or positions, as in conversations with the
    environment's tokens."""

    fate: Fate
    """`dropped`: dynamic sampling left it out."""


@dataclass(kw_only=True, slots=True)  # not frozen: the analyzer adds collisions, then the alarm
class DiversityRow:
    """What the monitor measured in one round; an evaluation has a row for each of its batches."""

    round: RoundId
    num_samples: int
    num_groups: int
    verdict: str
    """One of `VERDICTS` (see `diversity.analyzer`)."""

    log10_p: float
    """p-value of the collision test, corrected; 0 where nothing was tested."""

    shared_bits: float
    num_pairs: int
    num_earlier_pairs: int
    num_untested: int
    metrics: dict[str, float]
    collisions: list[dict[str, Any]] = field(default_factory=list)
    """The fields of `collision.Collision`, of some samples the id, seed, rank and replica, and
    `num_samples` of all."""

    worst_groups: list[int] = field(default_factory=list)
    """Numbers of groups: first those with collisions, then those with most copies."""

    remedy: str = ""
    """Key of the remedy in `alarms`; empty without alarm."""

    alarm: str | None = None
    """The alarm's text; None for none. The log, the page and the reporters count these alarms and
    no others."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps that are done when ms-swift logs the round: a round that begins at step s
        serves the step after it; an evaluation stands at its own."""
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


# --- rows to columns, and back ---


def rounds_of(rows: Iterable[Row], table: Table, *, session: int) -> list[tuple[RoundId, pa.Table]]:
    """Return the rows of each round as the files hold them; raises what `to_arrow` does."""
    rounds: dict[RoundId, list[Row]] = {}
    for row in rows:
        name = row.round if isinstance(row, DiversityRow) else row.sample_id.round
        rounds.setdefault(name, []).append(row)
    return [(name, to_arrow(found, table, session=session)) for name, found in rounds.items()]


def to_arrow(rows: Sequence[Row], table: Table, *, session: int) -> pa.Table:
    """Return rows as the files hold them.

    A row, or what names it, has an attribute for each column of its table.

    Raises:
        ValueError: a row's counts disagree, naming the sample; or a value does not fit its column.
    """
    names = [row.round if isinstance(row, DiversityRow) else row.sample_id for row in rows]
    arrays, fields = [], []
    values: Sequence[Any]
    for column in table.schema:
        if column.name == "session":
            values = [session] * len(rows)
        elif column.name in SAMPLE_ID_COLUMNS:
            values = [getattr(name, column.name) for name in names]
        else:
            values = [getattr(row, column.name) for row in rows]  # `num_tokens` checks the counts
        if column.name == "logprobs":
            values = [lp if lp is None else _rounded(lp) for lp in values]
        elif column.name == "collisions":
            values = [json.dumps(each, ensure_ascii=False) for each in values]
        elif column.name == "metrics":
            values = [list(metrics.items()) for metrics in values]
        arrays.append(pa.array(values, column.type))
        fields.append(column)
    return pa.table(arrays, schema=pa.schema(fields))


def _rounded(logprobs: Numbers) -> np.ndarray:
    """Return values in steps of 1 / `LOGPROB_STEPS`; behind 2^15 nats float32 has coarser ones."""
    return np.rint(np.asarray(logprobs, np.float32) * LOGPROB_STEPS) / LOGPROB_STEPS


def to_rows(table: pa.Table) -> list[SampleRow]:
    """Return the rows of a table with all columns of `SAMPLES`."""
    rows = []
    for values in table.drop_columns(["session", "num_tokens"]).to_pylist():
        sample_id = SampleId(**{name: values.pop(name) for name in SAMPLE_ID_COLUMNS})
        rows.append(SampleRow(sample_id=sample_id, **values))
    return rows


def to_diversity(table: pa.Table) -> list[DiversityRow]:
    """Return the rows of a table with all columns of `DIVERSITY`."""
    rows = []
    for values in table.drop_columns(["session"]).to_pylist():
        round_ = RoundId(*(values.pop(name) for name in ROUND_COLUMNS))
        values["metrics"] = dict(values["metrics"])  # Arrow gives a map as pairs
        values["collisions"] = json.loads(values["collisions"])
        rows.append(DiversityRow(round=round_, **values))
    return rows
