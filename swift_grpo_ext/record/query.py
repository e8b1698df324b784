"""Reads a run's record with SQL (DuckDB): each row once, over all sessions.

`Record` has a view for each table, `samples`, `rewards` and `diversity`, and `scored`, which joins
samples with their scores. In `scored`, a sample without a score has the `fate` `generated`.

**Each row once.** A session that was resumed from the checkpoint of optimizer step s supersedes
these rounds of earlier sessions:

- `train` rounds of step s and later: a round has the step at which it begins;
- `eval` rounds of steps after s: the evaluation at s ran after update s and before the checkpoint,
  and the resumed run need not evaluate there again;
- all rounds, if s is 0: the run began again;
- each round that the later session has rows of, such as a round that was interrupted. A round is
  replaced whole, so that no group holds samples of two sessions.

A session that wrote no rows supersedes nothing. A score counts only if it has the session
of its sample. A damaged file is left out whole, with a warning, until it changes.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from swift_grpo_ext.record.log import RecordFile, record_files
from swift_grpo_ext.record.tables import (
    DIVERSITY,
    REWARDS,
    ROUND_COLUMNS,
    SAMPLE_ID_COLUMNS,
    SAMPLES,
    TABLES,
    DiversityRow,
    RunDir,
    SampleRow,
    Table,
    to_rows,
)
from swift_grpo_ext.sampling.seeding import Phase, RoundId

logger = logging.getLogger(__name__)

BATCH_ROWS = 1024  # of a file that is checked, in memory at a time

# pyarrow and DuckDB raise these if bytes or columns differ from those that were written.
DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, duckdb.Error)

# The rounds in each undamaged file; `owner` is the file's table.
ROUNDS = """
create table rounds (
    owner text, session int, start_step bigint, phase text, step bigint, number bigint, path text)
"""

COUNTED = """
create or replace table counted as
with starts as (select distinct owner, session, start_step from rounds),
     latest as (
        select owner, phase, step, number, max(session) as session from rounds group by all)
from latest where not exists (
    from starts
    where starts.owner = latest.owner and starts.session > latest.session
      and (start_step = 0 or step > start_step or (step = start_step and phase = 'train')))
"""

SCORED = """
create or replace view scored as
select samples.*, rewards.* exclude (session, phase, step, number, "group", "index", fate),
       coalesce(fate, 'generated') as fate
from samples left join rewards using (session, phase, step, number, "group", "index")
"""


class Record:
    """Reads a run's record, also while the run goes on: `refresh` looks for new files. Several
    threads may query it at once."""

    def __init__(self, run_dir: RunDir, *, max_mb: int = 2000) -> None:
        """Make empty views. `max_mb` bounds DuckDB's memory; a temporary folder has the rest."""
        self.run_dir = Path(run_dir)
        self.version = -1  # from 0; grows when the views change
        self.is_whole = False  # whether the views show all files that were on disk
        self._lock = Lock()
        self._sound: set[RecordFile] = set()
        # Files that are left out, with their sizes and times; None if the next try may succeed.
        self._unread: dict[RecordFile, tuple[int, int] | None] = {}
        self._spill = tempfile.TemporaryDirectory(prefix="swift-grpo-ext-")
        self._database = duckdb.connect(
            config={
                "memory_limit": f"{max_mb}MB",
                "temp_directory": self._spill.name,
                "preserve_insertion_order": False,
            }
        )
        self._database.execute(ROUNDS)
        for table in TABLES:
            # Not `schema.empty_table()`: it imports pandas, if installed (70 MB, a second).
            empty = pa.RecordBatchReader.from_batches(table.schema, [])
            self._database.from_arrow(empty).create(f"no_{table.name}")
        self._publish()

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Check new files, the newest first, for at most `seconds`, and add their rows to the
        views. Return whether the views have changed. Raise `OSError` if a folder cannot be
        listed."""
        deadline = time.monotonic() + seconds
        with self._lock:
            files = {f: table for table in TABLES for f in record_files(table.folder(self.run_dir))}
            before = self._sound
            self._sound = before & files.keys()  # `SampleLog` has merged or removed the others
            self._unread = {f: version for f, version in self._unread.items() if f in files}
            new = sorted(files.keys() - before)
            new = [file for file in new if self._unread.get(file) != _version_of(file.path)]
            while new:
                file = new.pop()
                self._check(file, files[file])
                if time.monotonic() > deadline:
                    break
            self.is_whole = not new
            if has_changed := self._sound != before:
                pa.default_memory_pool().release_unused()  # 25 MB of the files that were checked
                self._publish()
            return has_changed

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection to the views; each thread needs its own."""
        return self._database.cursor()

    def table(self, query: str, values: Sequence[Any] | dict[str, Any] = ()) -> pa.Table:
        """Return the result of a query, without the rows of files that cannot be read."""
        # First for files that are gone since `refresh`, then for files that DuckDB cannot read.
        repairs: list[Callable[[], object]] = [self.refresh, self._leave_out_unreadable]
        for repair in repairs:
            try:
                return self.cursor().sql(query, params=values or None).to_arrow_table()
            except duckdb.OutOfMemoryException:
                raise
            except duckdb.Error:
                repair()
        return self.cursor().sql(query, params=values or None).to_arrow_table()

    def rows(self, query: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of a query's result as dictionaries, with maps as dictionaries."""
        found = self.table(query, values)
        maps = [field.name for field in found.schema if pa.types.is_map(field.type)]
        rows = found.to_pylist()
        for row in rows:
            row |= {name: None if row[name] is None else dict(row[name]) for name in maps}
        return rows

    def rounds(self) -> list[RoundId]:
        """Return the rounds with samples that count, the newest first; an evaluation comes
        before the training rounds of its step."""
        query = (
            "select phase, step, number from counted where owner = 'samples' "
            "order by step desc, phase, number desc"
        )
        return [RoundId(*row) for row in self.cursor().execute(query).fetchall()]

    def _check(self, file: RecordFile, table: Table) -> None:
        """Add a file if it is undamaged, else leave it out."""
        path = literal(str(file.path))
        try:
            check_file(file.path, table)
            self.cursor().execute(
                f"insert into rounds select distinct '{table.name}', {file.session}, "
                f"{file.start_step}, phase, step, number, {path} from read_parquet([{path}])"
            )
        except DAMAGE as e:
            self._leave_out(file, e)
        else:
            self._sound.add(file)
            self._unread.pop(file, None)

    def _leave_out(self, file: RecordFile, cause: Exception) -> None:
        """Leave out a file that cannot be read, and warn once until it changes."""
        if not (version := _version_of(file.path)):  # merged since, or removed
            return
        # Errors of the system (a file server's hiccup) have an `errno`, and may pass: the file is
        # tried again at each refresh. Arrow's errors of damage have none.
        unread = None if isinstance(cause, OSError) and cause.errno else version
        if self._unread.get(file, ()) != unread:
            logger.warning(
                "%s cannot be read (%s): its rows are left out. If it is damaged, restore it from "
                "a copy.",
                *(file.path, cause),
            )
        self._unread[file] = unread

    def _leave_out_unreadable(self) -> None:
        """Leave out each file that DuckDB fails to read."""
        # DuckDB reads headers that pyarrow skips.
        with self._lock:
            for file in [*self._sound]:
                path = literal(str(file.path))
                try:
                    with file.path.open("rb"):  # an error of the system has its number
                        query = f"select bit_xor(hash(columns(*))) from read_parquet([{path}])"
                        self.cursor().execute(query).fetchall()
                except duckdb.OutOfMemoryException:  # no fault of the file
                    continue
                except (OSError, duckdb.Error) as e:
                    self._sound.remove(file)
                    self._leave_out(file, e)
            self._publish()

    def _publish(self) -> None:
        """Let the views show each round of the undamaged files once."""
        paths = [str(file.path) for file in self._sound]
        cursor = self._database.cursor()
        # In one transaction: other threads query the views meanwhile.
        cursor.begin()
        cursor.execute("delete from rounds where path not in (select unnest(?::text[]))", [paths])
        cursor.execute(COUNTED)
        for table in TABLES:
            files = sorted(file for file in self._sound if file.path.parent.name == table.name)
            names = ", ".join(literal(str(file.path)) for file in files)
            source = f"read_parquet([{names}])" if files else f"no_{table.name}"
            # A score counts only with its sample: samples decide for both tables.
            owner = DIVERSITY.name if table is DIVERSITY else SAMPLES.name
            cursor.execute(
                f"create or replace view {table.name} as from {source} semi join "
                f"(from counted where owner = '{owner}') using (session, phase, step, number)"
            )
        cursor.execute(SCORED)
        cursor.commit()
        self.version += 1


def literal(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def where_round(name: RoundId) -> str:
    """Return the SQL condition for the rows of a round."""
    return f"phase = {literal(name.phase)} and step = {name.step:d} and number = {name.number:d}"


def check_file(path: Path, table: Table) -> None:
    """Read a whole file; raise one of `DAMAGE` if it is damaged."""
    # DuckDB reads no checksums of pages: pyarrow checks a file when it is first seen.
    with pq.ParquetFile(path, page_checksum_verification=True) as source:
        for batch in source.iter_batches(BATCH_ROWS, use_threads=False):
            rows = pa.Table.from_batches([batch])
            rows.validate(full=True)  # checksums cover pages, and neither their headers nor footers
            rows = rows.select(table.schema.names).cast(table.schema)
            for name in ("token_ids", "logprobs", "mask") if table is SAMPLES else ():
                lengths = pc.list_value_length(rows[name])
                if pc.any(pc.not_equal(lengths, rows["num_tokens"])).as_py():
                    raise ValueError(f"{name} and tokens differ in number")
        if not source.metadata.num_rows:
            raise ValueError("it has no rows")


def _version_of(path: Path) -> tuple[int, int] | None:
    """Return a file's size and time; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


# --- whole tables ---


def open_record(run_dir: RunDir) -> Record:
    """Return a run's record with all files that are on disk. Raise `FileNotFoundError` if the run
    has no samples, and `OSError` if its folder cannot be read."""
    if not SAMPLES.folder(run_dir).is_dir():
        raise FileNotFoundError(
            f"{run_dir} has no samples: no round has been generated yet, or the training has "
            "--sample_log none."
        )
    record = Record(run_dir)
    record.refresh()
    return record


def read_samples(run_dir: RunDir, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a run's samples, sorted by phase, step, number, group, index and turn, with `columns`
    in this order. Raise the errors of `open_record`, and `KeyError` for an unknown column."""
    return _read(run_dir, SAMPLES, columns)


def read_rewards(run_dir: RunDir, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the scores of a run's samples, sorted by phase, step, number, group and index. The
    errors are those of `read_samples`."""
    return _read(run_dir, REWARDS, columns)


def diversity_of(record: Record) -> list[DiversityRow]:
    """Return the monitor's row of each round, in the order of the steps that log them."""
    found = []
    for values in record.rows("select * exclude session from diversity"):
        round_ = RoundId(*(values.pop(name) for name in ROUND_COLUMNS))
        values["collisions"] = json.loads(values["collisions"])
        found.append(DiversityRow(round=round_, **values))
    return sorted(found, key=lambda r: (r.steps_done, r.round.phase == "eval", r.round.number))


def read_group(
    run_dir: RunDir, *, phase: Phase, step: int, number: int, group: int
) -> list[SampleRow]:
    """Return all completions of one group, by index and turn. Raise the errors of `open_record`,
    and `ValueError` if the record holds no such group."""
    record = open_record(run_dir)
    where = f'{where_round(RoundId(phase, step, number))} and "group" = {group:d}'
    if rows := to_rows(record.table(f'from samples where {where} order by "index", turn')):
        return rows
    known = [name.step for name in record.rounds() if name.phase == phase]
    span = f"{phase} steps {min(known)} to {max(known)}" if known else f"no {phase} rounds"
    raise ValueError(
        f"{run_dir} holds no group {group} of {phase} round {step}.{number}; it has {span}."
    )


def _read(run_dir: RunDir, table: Table, columns: Sequence[str] | None) -> pa.Table:
    names = table.schema.names if columns is None else list(columns)
    schema = pa.schema([table.schema.field(name) for name in names])  # KeyError
    order = ", ".join(f'"{name}"' for name in SAMPLE_ID_COLUMNS if name in table.schema.names)
    selected = ", ".join(f'"{name}"' for name in names)
    query = f"select {selected} from {table.name} order by {order}"
    return open_record(run_dir).table(query).cast(schema)
