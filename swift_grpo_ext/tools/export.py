"""`swift-grpo-ext samples`: what a run's record holds, in figures, as rows, or as one file."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from swift_grpo_ext.record.reader import RoundName, index_rewards, index_samples
from swift_grpo_ext.record.rewards import REWARD_SCHEMA
from swift_grpo_ext.record.row import SAMPLE_ID_COLUMNS, SCHEMA
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE, SampleId

ROWS_PER_ROW_GROUP = 16_384
"""At least, in a Parquet file; few enough to hold in memory with their tokens."""

PROGRESS_ROUNDS = 100
SCORE_COLUMNS = [
    field.with_nullable(True)  # null where a sample has no score yet
    for field in REWARD_SCHEMA
    if field.name not in (*SAMPLE_ID_COLUMNS, "rewards")
]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows of a run, and in which order."""

    where: str | None = None
    """As pandas' `DataFrame.query` takes it: `reward < 0.5 and finish_reason == "length"`."""

    sort: str | None = None
    """A column; None for the order of the samples' names. Rows without a value come last."""

    descending: bool = False
    limit: int | None = None


class Record:
    """The samples of a run with their scores."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        """Raises FileNotFoundError or ValueError as `reader.index_samples`."""
        self.samples = index_samples(run_dir)
        self.scores = index_rewards(self.samples, run_dir)
        found = self.scores.read(["rewards"])["rewards"].combine_chunks()
        self.functions = sorted(found.keys.unique().to_pylist())
        functions = [pa.field(f"reward_{name}", pa.float32()) for name in self.functions]
        self.schema = pa.schema([*SCHEMA, *SCORE_COLUMNS, *functions])

    def read(self, name: RoundName) -> pa.Table:
        """One round, its rows as `schema` has them; no score is null."""
        [table] = self.samples.read_rounds([name])
        found = self.scores.read_rounds([name] if name in self.scores.rounds else [])
        scores = pa.concat_tables([REWARD_SCHEMA.empty_table(), *found])
        numbers = pa.array(_sample_numbers(scores))
        rows = pc.index_in(pa.array(_sample_numbers(table)), value_set=numbers)
        for column in SCORE_COLUMNS:
            table = table.append_column(column, scores[column.name].take(rows))
        for function in self.functions:
            values = pc.map_lookup(scores["rewards"], function, "first").take(rows)
            table = table.append_column(f"reward_{function}", values)
        return table.cast(self.schema)

    def tables(self, selection: Selection) -> Iterator[pa.Table]:
        """The selected rows. Unsorted, only one round is in memory; sorted, those up to the limit.

        Raises:
            ValueError: there is no such column, or the condition cannot be read.
        """
        if selection.sort is not None and selection.sort not in self.schema.names:
            raise ValueError(f"--sort {selection.sort}: expected one of {self.schema.names}.")
        best = self.schema.empty_table()
        num_rows, limit = 0, sys.maxsize if selection.limit is None else selection.limit
        disable = len(self.samples.rounds) < PROGRESS_ROUNDS
        for name in tqdm(self.samples.rounds, desc="Reading rounds", unit="round", disable=disable):
            table = _filtered(self.read(name), selection.where)
            if selection.sort is not None:
                best = _sorted(pa.concat_tables([best, table]), selection)
                continue
            yield table[: limit - num_rows]
            num_rows += table.num_rows
            if num_rows >= limit:
                break
        if selection.sort is not None:
            yield best


def _sample_numbers(table: pa.Table) -> np.ndarray:
    """One number for each sample of a round."""
    return table["group"].to_numpy() * MAX_GROUP_SIZE + table["index"].to_numpy()


def _filtered(table: pa.Table, where: str | None) -> pa.Table:
    if where is None:
        return table
    import pandas as pd

    plain = [field.name for field in table.schema if not pa.types.is_list(field.type)]
    frame = table.select(plain).to_pandas(types_mapper=pd.ArrowDtype)
    try:
        mask = frame.eval(where, engine="python")
        if not pd.api.types.is_bool_dtype(mask):
            raise TypeError("no condition")
        keep = pd.Series(mask, dtype="boolean").fillna(False).to_numpy(bool)
    except Exception as e:  # pandas raises whatever it stumbles over
        raise ValueError(
            f"--where {where!r} cannot be read ({type(e).__name__}: {e}): expected a condition on "
            f"{', '.join(plain)}, such as 'reward < 0.5 and finish_reason == \"length\"'."
        ) from e
    return table.filter(pa.array(keep))


def _sorted(table: pa.Table, selection: Selection) -> pa.Table:
    order = "descending" if selection.descending else "ascending"
    names = [(name, "ascending") for name in SAMPLE_ID_COLUMNS]
    return table.sort_by([(selection.sort, order), *names])[: selection.limit]


def export(
    run_dir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    selection: Selection | None = None,
) -> int:
    """Write the selected rows to one file; all, without a selection.

    Args:
        output: ends with `.parquet` or `.jsonl`; replaced once it is whole.

    Returns:
        The number of rows.

    Raises:
        FileNotFoundError: the run has no sample log.
        OSError: the file cannot be written.
        ValueError: another suffix, a wrong selection, or the log cannot be read.
    """
    output = Path(output)
    write = {".parquet": _write_parquet, ".jsonl": _write_jsonl}.get(output.suffix)
    if write is None:
        raise ValueError(f"--output {output}: expected a name that ends with .parquet or .jsonl.")
    record = Record(run_dir)
    unfinished = output.with_name(f"{output.name}.part")
    try:
        num_rows = write(record.tables(selection or Selection()), record.schema, unfinished)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_rows


def _write_parquet(tables: Iterator[pa.Table], schema: pa.Schema, path: Path) -> int:
    num_rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        waiting = schema.empty_table()
        for table in tables:
            waiting = pa.concat_tables([waiting, table])
            num_rows += table.num_rows
            if waiting.num_rows >= ROWS_PER_ROW_GROUP:
                writer.write_table(waiting)
                waiting = schema.empty_table()
        writer.write_table(waiting)
    return num_rows


def _write_jsonl(tables: Iterator[pa.Table], schema: pa.Schema, path: Path) -> int:
    num_rows = 0
    with path.open("w", encoding="utf-8") as file:
        for row in chain.from_iterable(table.to_pylist() for table in tables):
            file.write(json.dumps(_json_value(row), ensure_ascii=False, allow_nan=False) + "\n")
            num_rows += 1
    return num_rows


def _json_value(value: Any) -> Any:
    """JSON has no infinity and no NaN: null stands for them."""
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(run_dir: str | os.PathLike[str], selection: Selection) -> Iterator[str]:
    """The selected rows for people: one line each.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: a wrong selection, or the log cannot be read.
    """
    columns = [*SAMPLE_ID_COLUMNS, "reward", "num_tokens", "finish_reason", "text"]
    cells = [("sample", "reward", "tokens", "ended by", "text")]
    for table in Record(run_dir).tables(selection):
        for row in table.select(columns).to_pylist():
            reward = "" if row["reward"] is None else f"{row['reward']:.4g}"
            name = SampleId(**{name: row[name] for name in SAMPLE_ID_COLUMNS}).request_id
            reason = row["finish_reason"] or ""
            cells.append((name, reward, str(row["num_tokens"]), reason, repr(row["text"])[:100]))
    yield from _table(cells)


# --- the summary ---


def summary(run_dir: str | os.PathLike[str]) -> str:
    """Phases, sessions and seeds of a run's samples, in words and figures.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: the log cannot be read.
    """
    index = index_samples(run_dir)
    names = SAMPLE_ID_COLUMNS[:-1]
    table = index.read([*names, "seed", "num_tokens", "finish_reason"])
    phases = [["phase", "rounds", "groups", "samples", "turns", "tokens", "ended by"]]
    for phase in sorted(table["phase"].unique().to_pylist()):
        rows = table.filter(pc.equal(table["phase"], phase))
        counts = [rows.group_by(names[:n]).aggregate([]).num_rows for n in (3, 4, 5)]
        counts += [rows.num_rows, pc.sum(rows["num_tokens"]).as_py()]
        reasons = ", ".join(
            f"{reason or 'unknown'} {count / rows.num_rows:.1%}"
            for reason, count in Counter(rows["finish_reason"].to_pylist()).most_common()
        )
        phases.append([phase, *(f"{count:,}" for count in counts), reasons])
    sessions = [["session", "from step", "files", "turns", "superseded", "unread bytes"]]
    sessions += [[f"{figure:,}" for figure in astuple(session)] for session in index.sessions]
    seeds = table["seed"].drop_null()
    num_repeated = len(seeds) - len(seeds.unique())
    last = f"seeds: {len(seeds):,} recorded, {num_repeated:,} repeated"
    return "\n".join([*_table(phases), "", *_table(sessions), "", last])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns aligned: the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ([*map(str.rjust, row[:-1], widths), row[-1]] for row in rows)
    return ["  ".join(cells) for cells in aligned]
