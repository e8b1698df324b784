"""Reads the sample log of a run, all sessions and ranks as one table. Pure.

Columns that are not asked for are not touched: `scripts/bench/sample_log.py` measures it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.file import RoundName, read_batches
from swift_grpo_ext.record.index import index_samples
from swift_grpo_ext.record.row import SCHEMA, SampleRow, column_names, to_rows
from swift_grpo_ext.sampling.seeding import Phase


def read_samples(
    run_dir: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    phase: Phase | None = None,
    steps: range | None = None,
) -> pa.Table:
    """The rows of a run, sorted by phase, step, number, group, index and turn.

    Args:
        columns: names, in the order that the table is to have; None for all.
        phase: None for both.
        steps: of the rounds; None for all.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: there is no such column, or the log cannot be read.
    """
    wanted = column_names(columns)
    index = index_samples(run_dir)
    names = [
        name
        for name in index.rounds
        if phase in (None, name.phase) and (steps is None or name.step in steps)
    ]
    empty = pa.schema([SCHEMA.field(column) for column in wanted]).empty_table()
    return pa.concat_tables([empty, *index.read_rounds(names, wanted)])


def read_group(
    run_dir: str | os.PathLike[str], *, phase: Phase, step: int, number: int, group: int
) -> list[SampleRow]:
    """All completions of one group, by index and turn, to be drawn again or looked at.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: the log holds no such group, or cannot be read.
    """
    index = index_samples(run_dir)
    name = RoundName(phase, step, number)
    batches = index.rounds.get(name, [])
    groups = read_batches(batches, ["group"])
    holding = [
        b for b, read in zip(batches, groups, strict=True) if group in read["group"].to_pylist()
    ]
    if not holding:
        steps = [name.step for name in index.rounds if name.phase == phase]
        span = f"{phase} steps {min(steps)} to {max(steps)}" if steps else f"no {phase} rounds"
        raise ValueError(
            f"{run_dir} holds no group {group} of {phase} round {step}.{number}; it has {span}."
        )
    table = pa.Table.from_batches(read_batches(holding, SCHEMA.names))
    table = table.filter(pc.equal(table["group"], group))
    return to_rows(table.sort_by([("index", "ascending"), ("turn", "ascending")]))
