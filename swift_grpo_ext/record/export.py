"""`swift-grpo-ext samples`: what a run's sample log holds, in figures or as one file."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from swift_grpo_ext.record.index import SampleIndex, index_samples
from swift_grpo_ext.record.row import SCHEMA
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE

ROWS_PER_ROW_GROUP = 16_384
"""At least, in a Parquet file; few enough to hold in memory with their tokens."""

PROGRESS_ROUNDS = 100


def export(run_dir: str | os.PathLike[str], output: str | os.PathLike[str]) -> int:
    """Write the rows that `sample_reader.read_samples` gives, in that order, to one file.

    Args:
        output: ends with `.parquet` or `.jsonl`; replaced once it is whole.

    Returns:
        The number of rows.

    Raises:
        FileNotFoundError: the run has no sample log.
        OSError: the file cannot be written.
        ValueError: another suffix, or the log cannot be read.
    """
    output = Path(output)
    write = {".parquet": _write_parquet, ".jsonl": _write_jsonl}.get(output.suffix)
    if write is None:
        raise ValueError(f"--output {output}: expected a name that ends with .parquet or .jsonl.")
    index = index_samples(run_dir)
    with _replaced(output) as part:
        write(_tables(index), part)
    return index.num_rows


def summary(run_dir: str | os.PathLike[str]) -> str:
    """Phases, sessions and seeds of a run's samples, in words and figures.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: the log cannot be read.
    """
    index = index_samples(run_dir)
    phases: dict[str, PhaseCount] = defaultdict(PhaseCount)
    columns = ["group", "index", "seed", "num_tokens", "finish_reason"]
    tables = index.read_rounds(index.rounds, columns)
    for (phase, _, _), table in zip(index.rounds, tables, strict=True):
        phases[phase].add(table)
    head = ("phase", "rounds", "groups", "samples", "turns", "tokens", "ended by")
    lines = _table([head, *(phases[phase].cells(phase) for phase in sorted(phases))])
    lines += ["", *_table(_session_cells(index)), ""]
    lines += [_seeds_line([seeds for count in phases.values() for seeds in count.seeds])]
    return "\n".join(lines)


@dataclass(kw_only=True)
class PhaseCount:
    """Sums over the rounds of one phase."""

    num_rounds: int = 0
    num_groups: int = 0
    num_samples: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    finish_reasons: Counter[str | None] = field(default_factory=Counter)
    seeds: list[np.ndarray] = field(default_factory=list)

    def add(self, table: pa.Table) -> None:
        groups = table["group"].to_numpy()
        self.num_rounds += 1
        self.num_groups += len(np.unique(groups))
        self.num_samples += len(np.unique(groups * MAX_GROUP_SIZE + table["index"].to_numpy()))
        self.num_turns += table.num_rows
        self.num_tokens += int(table["num_tokens"].to_numpy().sum(dtype=np.int64))
        self.finish_reasons.update(table["finish_reason"].to_pylist())
        self.seeds.append(table["seed"].drop_null().to_numpy())

    def cells(self, phase: str) -> tuple[str, ...]:
        counts = (self.num_rounds, self.num_groups, self.num_samples, self.num_turns)
        reasons = ", ".join(
            f"{reason or 'unknown'} {count / self.num_turns:.1%}"
            for reason, count in self.finish_reasons.most_common()
        )
        return (phase, *(f"{count:,}" for count in (*counts, self.num_tokens)), reasons)


def _session_cells(index: SampleIndex) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = [
        ("session", "from step", "files", "turns", "superseded", "unread bytes")
    ]
    for session in index.sessions:
        counts = (session.num_files, session.num_rows, session.num_superseded)
        figures = (session.session, session.start_step, *counts, session.num_unread_bytes)
        cells.append(tuple(f"{figure:,}" for figure in figures))
    return cells


def _seeds_line(seeds: Sequence[np.ndarray]) -> str:
    drawn = np.concatenate([np.empty(0, np.int64), *seeds])
    num_repeated = len(drawn) - len(np.unique(drawn))
    return f"seeds: {len(drawn):,} recorded, {num_repeated:,} repeated"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns aligned: the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(cell.rjust(w) for cell, w in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]


def _tables(index: SampleIndex) -> Iterator[pa.Table]:
    """One table a round, in order; only one is in memory."""
    disable = len(index.rounds) < PROGRESS_ROUNDS
    for name in tqdm(index.rounds, desc="Reading rounds", unit="round", disable=disable):
        yield from index.read_rounds([name])


@contextmanager
def _replaced(output: Path) -> Iterator[Path]:
    """A file beside `output` that takes its place unless an error leaves the block."""
    part = output.with_name(f"{output.name}.part")
    try:
        yield part
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


def _write_parquet(tables: Iterator[pa.Table], path: Path) -> None:
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        waiting: list[pa.Table] = []
        for table in tables:
            waiting.append(table)
            if sum(map(len, waiting)) >= ROWS_PER_ROW_GROUP:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


def _write_jsonl(tables: Iterator[pa.Table], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            for row in table.to_pylist():
                row["logprobs"] = _json_numbers(row["logprobs"])
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _json_numbers(values: list[float] | None) -> list[Any] | None:
    """JSON has no infinity and no NaN: null stands for them."""
    if values is None or all(map(math.isfinite, values)):
        return values
    return [value if math.isfinite(value) else None for value in values]
