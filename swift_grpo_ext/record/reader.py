"""Reads the tables of a run's record, all sessions and ranks as one. Pure.

**Each row once.** A session that was resumed from the checkpoint of optimizer step s supersedes, of
the sessions before it,

- `train` rounds of step s and later: a round bears the step at which it begins;
- `eval` rounds of steps after s: the evaluation at s ran after update s and before the checkpoint,
  and the resumed run need not evaluate there again;
- everything, if s is 0: such a run began anew;
- any round that it has rows of itself, such as one that it was resumed in the middle of. A round is
  replaced whole, never sample by sample, so that no group holds samples of two sessions.

A session of which no whole batch was written supersedes nothing. Scores count where they are of the
session whose samples count.

**What is not whole.** A file is read up to its last whole batch: what follows was being written
when its writer was killed, or is being written now. Batches that are damaged are left out; a
warning names the file and the rows, and the others are read.

Reads touch only the columns of the call: `scripts/bench/sample_log.py` measures it.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.checksums import check_columns
from swift_grpo_ext.record.log import CRC32, FILE_NAME, SAMPLES, Table, header_checksum
from swift_grpo_ext.record.rewards import REWARDS
from swift_grpo_ext.record.row import HALVES, ROUND_COLUMNS, SampleRow, join_halves, to_rows
from swift_grpo_ext.sampling.seeding import Phase

logger = logging.getLogger(__name__)

MESSAGE_START = re.compile(b"(?=\xff{4})")  # they may overlap
END_MARK_BYTES = 8
DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, StopIteration)
"""What pyarrow raises for bytes that are no message, no batch, or no text."""


class UnreadableLogError(ValueError):
    """A folder holds files of another version, or of several runs."""


class RoundName(NamedTuple):
    """Which round; sorts as tables of samples do."""

    phase: str
    step: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBatch:
    """Where a file holds rows of one round."""

    path: Path
    session: int
    round: RoundName
    offset: int
    """Bytes from the file's start."""

    first_row: int
    """Rows of the file before it."""

    num_rows: int


@dataclass(kw_only=True, slots=True)
class SessionSummary:
    """What the files of one session hold."""

    session: int
    start_step: int
    """Optimizer step of the checkpoint that it was resumed from."""

    num_files: int = 0
    num_rows: int = 0
    num_superseded: int = 0
    """Rows that a later session replaced."""

    num_unread_bytes: int = 0
    """Behind the last whole batches of its files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIndex:
    """Where the rows that count are."""

    table: Table
    rounds: dict[RoundName, list[StoredBatch]]
    """In order: `eval` before `train`, then by step and number."""

    sessions: list[SessionSummary] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batches in self.rounds.values() for batch in batches)

    def select(self, columns: Sequence[str] | None) -> list[str]:
        """The names of these columns; of all, for None.

        Raises:
            ValueError: there is no such column.
        """
        names = self.table.schema.names
        unknown = set(columns or ()) - set(names)
        if unknown:
            raise ValueError(
                f"No columns {sorted(unknown)} of {self.table.name}; there are {names}."
            )
        return names if columns is None else list(columns)

    def read_rounds(
        self, names: Iterable[RoundName], columns: Sequence[str] | None = None
    ) -> list[pa.Table]:
        """The rows of each round, sorted by group, index and turn; opens each file once.

        Args:
            columns: names, in the order that the tables are to have; None for all.

        Raises:
            KeyError: there is no such round.
            ValueError: there is no such column.
        """
        selected = self.select(columns)
        of_rounds = [self.rounds[name] for name in names]
        read = iter(_read_batches(self.table, [*chain(*of_rounds)], {*selected, *self._order}))
        return [self._sorted(islice(read, len(b))).select(selected) for b in of_rounds]

    def read(
        self,
        columns: Sequence[str] | None = None,
        phase: Phase | None = None,
        steps: range | None = None,
    ) -> pa.Table:
        """All rows, or those of a phase and some steps, as `read_samples` describes it."""
        schema = pa.schema([self.table.schema.field(name) for name in self.select(columns)])
        names = [n for n in self.rounds if phase in (None, n.phase)]
        names = [n for n in names if steps is None or n.step in steps]
        return pa.concat_tables([schema.empty_table(), *self.read_rounds(names, columns)])

    @property
    def _order(self) -> list[str]:
        return [name for name in ("group", "index", "turn") if name in self.table.schema.names]

    def _sorted(self, batches: Iterable[pa.RecordBatch | None]) -> pa.Table:
        """Those that could be read as one table; with all columns if there are none."""
        found = [batch for batch in batches if batch is not None]
        table = pa.Table.from_batches(found) if found else self.table.schema.empty_table()
        return table.sort_by([(name, "ascending") for name in self._order])


def index_samples(run_dir: str | os.PathLike[str]) -> SampleIndex:
    """Find the rows of the sample log; reads no tokens or text.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: another version of swift-grpo-ext wrote it, or the files of a session disagree
            about where it began.
    """
    if not SAMPLES.folder(run_dir).is_dir():
        raise FileNotFoundError(
            f"{SAMPLES.folder(run_dir)} does not exist: {run_dir} is no output folder of a run "
            "that logged samples."
        )
    return _index(SAMPLES, run_dir)


def index_rewards(samples: SampleIndex, run_dir: str | os.PathLike[str]) -> SampleIndex:
    """Find the scores of the samples that count; raises as `index_samples`."""
    scores = _index(REWARDS, run_dir)
    of_session = {name: batches[0].session for name, batches in samples.rounds.items()}
    rounds = {
        name: [batch for batch in batches if batch.session == of_session.get(name)]
        for name, batches in scores.rounds.items()
    }
    return SampleIndex(table=REWARDS, rounds={n: found for n, found in rounds.items() if found})


def read_samples(
    run_dir: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    phase: Phase | None = None,
    steps: range | None = None,
) -> pa.Table:
    """The samples of a run, sorted by phase, step, number, group, index and turn.

    Args:
        columns: names, in the order that the table is to have; None for all.
        phase: None for both.
        steps: of the rounds; None for all.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: there is no such column; or as `index_samples`.
    """
    return index_samples(run_dir).read(columns, phase, steps)


def read_rewards(
    run_dir: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    phase: Phase | None = None,
    steps: range | None = None,
) -> pa.Table:
    """How the samples of a run scored (`rewards.RewardRow`), sorted by phase, step, number, group
    and index; arguments and errors as of `read_samples`."""
    return index_rewards(index_samples(run_dir), run_dir).read(columns, phase, steps)


def read_group(
    run_dir: str | os.PathLike[str], *, phase: Phase, step: int, number: int, group: int
) -> list[SampleRow]:
    """All completions of one group, by index and turn.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: the log holds no such group; or as `index_samples`.
    """
    index = index_samples(run_dir)
    batches = index.rounds.get(RoundName(phase, step, number), [])
    wanted = pc.field("group") == group
    groups = zip(batches, _read_batches(SAMPLES, batches, ["group"]), strict=True)
    holding = [b for b, read in groups if read is not None and read.filter(wanted).num_rows]
    table = index._sorted(_read_batches(SAMPLES, holding, SAMPLES.schema.names)).filter(wanted)
    if not table.num_rows:
        steps = [name.step for name in index.rounds if name.phase == phase]
        span = f"{phase} steps {min(steps)} to {max(steps)}" if steps else f"no {phase} rounds"
        raise ValueError(
            f"{run_dir} holds no group {group} of {phase} round {step}.{number}; it has {span}."
        )
    return to_rows(table)


# --- sessions ---


def _index(table: Table, run_dir: str | os.PathLike[str]) -> SampleIndex:
    sessions: dict[int, SessionSummary] = {}
    batches_of: dict[RoundName, list[StoredBatch]] = defaultdict(list)
    folder = table.folder(run_dir)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if FILE_NAME.fullmatch(path.name):
            for batch in _scan(table, path, sessions):
                batches_of[batch.round].append(batch)
    current = {name: _current(batches_of[name], sessions) for name in sorted(batches_of)}
    return SampleIndex(
        table=table,
        rounds={name: batches for name, batches in current.items() if batches},
        sessions=[sessions[session] for session in sorted(sessions)],
    )


def is_superseded(phase: str, step: int, start_step: int) -> bool:
    """Whether a session that began at `start_step` replaces the rounds of sessions before it."""
    return start_step == 0 or step > start_step or (step == start_step and phase == "train")


def _current(
    batches: Sequence[StoredBatch], sessions: dict[int, SessionSummary]
) -> list[StoredBatch]:
    """Of the batches of one round, those that no later session superseded; counts the others."""
    name, latest = batches[0].round, max(batch.session for batch in batches)
    starts = [s.start_step for s in sessions.values() if s.session > latest and s.num_rows]
    superseded = any(is_superseded(name.phase, name.step, start) for start in starts)
    kept = [batch for batch in batches if batch.session == latest and not superseded]
    for batch in batches:
        sessions[batch.session].num_superseded += batch.num_rows * (batch not in kept)
    return kept


# --- files ---


def _scan(table: Table, path: Path, sessions: dict[int, SessionSummary]) -> list[StoredBatch]:
    """The batches of a file; adds it to the summary of its session."""
    with pa.memory_map(str(path)) as source:
        starts, end, gaps = _find_messages(source)
        try:
            summary = _session(table, path, source, sessions)
        except UnreadableLogError:
            raise
        except DAMAGE:
            if starts:
                logger.warning(
                    "%s is damaged in its first bytes: none of its rows can be read, restore it "
                    "from a copy.",
                    path,
                )
            return []
        batches: list[StoredBatch] = []
        num_rows = 0
        stream = _open(table, source, ROUND_COLUMNS)
        for start in starts:
            if start in gaps:
                _warn(path, f"in bytes {gaps[start]} to {start}, behind row {num_rows}")
            try:
                rounds = _read_batch(stream, source, start)
                name = _round_name(rounds)
            except DAMAGE as e:
                _warn(path, f"from byte {start} on, behind row {num_rows} ({e})")
                continue
            batches.append(
                StoredBatch(
                    path=path,
                    session=summary.session,
                    round=name,
                    offset=start,
                    first_row=num_rows,
                    num_rows=rounds.num_rows,
                )
            )
            num_rows += rounds.num_rows
        num_unread_bytes = source.size() - end
    if num_unread_bytes:
        logger.warning(
            "%s is not whole from byte %d on, behind row %d: its writer was killed, still "
            "writes, or %d bytes are damaged. They are left out.",
            *(path, end, num_rows, num_unread_bytes),
        )
    summary.num_files += 1
    summary.num_rows += num_rows
    summary.num_unread_bytes += num_unread_bytes
    return batches


def _find_messages(source: pa.NativeFile) -> tuple[list[int], int, dict[int, int]]:
    """Where the batches of a stream start; where what is whole ends; and, for batches with damage
    before them, where that begins."""
    starts: list[int] = []
    gaps: dict[int, int] = {}
    position = end = 0
    while True:
        source.seek(position)
        try:
            kind = pa.ipc.read_message(source).type
        except EOFError:
            kind = ""
            if source.size() - position <= END_MARK_BYTES:
                return starts, source.tell(), gaps
        except DAMAGE:
            kind = ""
        if kind == ("record batch" if position else "schema"):
            starts += [position] if position else []
            position = end = source.tell()
            continue
        # A damaged length misleads: look for batches within what the last one seemed to span, too.
        found = _next_batch_start(source, (starts[-1] if starts else 0) + 8)
        if found is None:
            return starts, end, gaps
        gaps[found] = min(position, found)
        position = found


def _next_batch_start(source: pa.NativeFile, position: int) -> int | None:
    source.seek(min(position, source.size()))
    content = source.read()
    for found in MESSAGE_START.finditer(content):
        source.seek(position + found.start())
        with suppress(*DAMAGE, EOFError):
            if pa.ipc.read_message(source).type == "record batch":
                return position + found.start()
    return None


def _session(
    table: Table, path: Path, source: pa.NativeFile, sessions: dict[int, SessionSummary]
) -> SessionSummary:
    """The session that a file's header names; raises one of `DAMAGE` where it is damaged."""
    source.seek(0)
    schema = pa.ipc.open_stream(source).schema
    metadata = {k.decode(): v.decode() for k, v in schema.metadata.items()}
    if metadata.get(CRC32, "") not in ("", header_checksum(metadata)):
        raise ValueError("another header")
    version = int(metadata["version"])
    known = {**table.older, table.version: table.stored}
    if version not in known:
        raise UnreadableLogError(
            f"{path} is of version {version} of its table, and this swift-grpo-ext reads "
            f"{', '.join(map(str, known))}: use the version of swift-grpo-ext that wrote it."
        )
    if not schema.equals(known[version]):
        raise ValueError("other columns")
    start_step = int(metadata["start_step"])
    match = FILE_NAME.fullmatch(path.name)
    assert match is not None
    number = int(match[1])
    summary = sessions.setdefault(number, SessionSummary(session=number, start_step=start_step))
    if summary.start_step != start_step:
        raise UnreadableLogError(
            f"{path} begins at step {start_step}, and other files of session {number} at step "
            f"{summary.start_step}: they are of different runs, keep those of one."
        )
    return summary


def _round_name(rounds: pa.RecordBatch) -> RoundName:
    for column in ROUND_COLUMNS:
        if pc.count_distinct(rounds[column]).as_py() != 1:
            raise ValueError(f"rows of one round with several values of {column}")
    return RoundName(*(rounds[column][0].as_py() for column in ROUND_COLUMNS))


def _read_batches(
    table: Table, batches: Sequence[StoredBatch], columns: Iterable[str]
) -> list[pa.RecordBatch | None]:
    """Some columns of each batch, in the table's order; None for damaged ones, with a warning."""
    names = list(columns)
    read: dict[int, pa.RecordBatch] = {}
    numbered = sorted(enumerate(batches), key=lambda pair: pair[1].path)  # each file once
    for path, of_file in groupby(numbered, key=lambda pair: pair[1].path):
        try:
            source = pa.memory_map(str(path))
        except FileNotFoundError:  # `--sample_log_gb` has removed it since
            continue
        with source:
            stream = _open(table, source, names)
            for number, batch in of_file:
                try:
                    rows = _read_batch(stream, source, batch.offset)
                    if rows.num_rows != batch.num_rows:
                        raise ValueError(f"{rows.num_rows} rows, not {batch.num_rows}")
                    read[number] = _filled(table, rows, names)
                except DAMAGE as e:
                    rows_of_file = f"{batch.first_row} to {batch.first_row + batch.num_rows - 1}"
                    phase, step, of_step = batch.round
                    _warn(path, f"in rows {rows_of_file} ({phase} round {step}.{of_step}; {e})")
    return [read.get(number) for number in range(len(batches))]


def _filled(table: Table, rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """With nulls for what a file of an earlier version does not have."""
    for name in [n for n in table.schema.names if n in names and n not in rows.schema.names]:
        field = table.schema.field(name)
        rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows


def _open(
    table: Table, source: pa.NativeFile, columns: Iterable[str]
) -> pa.ipc.RecordBatchStreamReader:
    """A reader of some columns of a file whose header is whole, for `_read_batch`."""
    source.seek(0)
    held = pa.ipc.open_stream(source).schema.names  # an earlier version's may be fewer
    indices = sorted(held.index(name) for name in columns if name in held)
    options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
    source.seek(0)
    return pa.ipc.open_stream(source, options=options)


def _read_batch(
    stream: pa.ipc.RecordBatchStreamReader, source: pa.NativeFile, offset: int
) -> pa.RecordBatch:
    """Raises one of `DAMAGE` where the batch is not what was written; in an older file, without
    checksums, as far as that shows."""
    source.seek(offset)
    batch, checksums = stream.read_next_batch_with_custom_metadata()
    batch.validate(full=True)
    if checksums or CRC32.encode() in stream.schema.metadata:
        check_columns(batch, checksums or {})
    columns = [join_halves(c) if c.type == HALVES else c for c in batch.columns]
    fields = [f.with_type(c.type) for f, c in zip(batch.schema, columns, strict=True)]
    return pa.record_batch(columns, schema=pa.schema(fields))


def _warn(path: Path, where: str) -> None:
    logger.warning(
        "%s is damaged %s: these rows are left out, and the others read. Restore it from a copy.",
        path,
        where,
    )
