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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.log import FILE_NAME, SAMPLES, Table
from swift_grpo_ext.record.rewards import REWARDS
from swift_grpo_ext.record.row import ROUND_COLUMNS, SampleRow, to_rows
from swift_grpo_ext.sampling.seeding import Phase

logger = logging.getLogger(__name__)

MESSAGE_START = b"\xff\xff\xff\xff"
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
        order = [name for name in ("group", "index", "turn") if name in self.table.schema.names]
        schema = pa.schema([self.table.schema.field(name) for name in selected])
        of_rounds = [self.rounds[name] for name in names]
        flat = [batch for batches in of_rounds for batch in batches]
        read = iter(_read_batches(self.table, flat, {*selected, *order}))
        tables = []
        for batches in of_rounds:
            found = [batch for batch in (next(read) for _ in batches) if batch is not None]
            table = pa.Table.from_batches(found) if found else None
            tables.append(
                schema.empty_table()
                if table is None
                else table.sort_by([(name, "ascending") for name in order]).select(selected)
            )
        return tables


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
    return _read(index_samples(run_dir), columns, phase, steps)


def read_rewards(
    run_dir: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    phase: Phase | None = None,
    steps: range | None = None,
) -> pa.Table:
    """How the samples of a run scored (`rewards.RewardRow`), sorted by phase, step, number, group
    and index; arguments and errors as of `read_samples`."""
    return _read(index_rewards(index_samples(run_dir), run_dir), columns, phase, steps)


def _read(
    index: SampleIndex, columns: Sequence[str] | None, phase: Phase | None, steps: range | None
) -> pa.Table:
    schema = pa.schema([index.table.schema.field(column) for column in index.select(columns)])
    names = [
        name
        for name in index.rounds
        if phase in (None, name.phase) and (steps is None or name.step in steps)
    ]
    return pa.concat_tables([schema.empty_table(), *index.read_rounds(names, columns)])


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
    groups = _read_batches(SAMPLES, batches, ["group"])
    holding = [
        batch
        for batch, read in zip(batches, groups, strict=True)
        if read is not None and group in read["group"].to_pylist()
    ]
    found = [b for b in _read_batches(SAMPLES, holding, SAMPLES.schema.names) if b is not None]
    if not found:
        steps = [name.step for name in index.rounds if name.phase == phase]
        span = f"{phase} steps {min(steps)} to {max(steps)}" if steps else f"no {phase} rounds"
        raise ValueError(
            f"{run_dir} holds no group {group} of {phase} round {step}.{number}; it has {span}."
        )
    table = pa.Table.from_batches(found)
    table = table.filter(pc.equal(table["group"], group))
    return to_rows(table.sort_by([("index", "ascending"), ("turn", "ascending")]))


# --- sessions ---


def _index(table: Table, run_dir: str | os.PathLike[str]) -> SampleIndex:
    sessions: dict[int, SessionSummary] = {}
    batches_of: dict[RoundName, list[StoredBatch]] = defaultdict(list)
    folder = table.folder(run_dir)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if FILE_NAME.fullmatch(path.name):
            for batch in _scan(table, path, sessions):
                batches_of[batch.round].append(batch)
    current = {name: _current(name, batches_of[name], sessions) for name in sorted(batches_of)}
    return SampleIndex(
        table=table,
        rounds={name: batches for name, batches in current.items() if batches},
        sessions=[sessions[session] for session in sorted(sessions)],
    )


def _current(
    name: RoundName, batches: Sequence[StoredBatch], sessions: dict[int, SessionSummary]
) -> list[StoredBatch]:
    """The batches of a round that no later session superseded; counts the others."""
    latest = max(batch.session for batch in batches)
    starts = [s.start_step for s in sessions.values() if s.session > latest and s.num_rows]
    superseded = any(
        start == 0 or name.step > start or (name.step == start and name.phase == "train")
        for start in starts
    )
    kept = []
    for batch in batches:
        if superseded or batch.session != latest:
            sessions[batch.session].num_superseded += batch.num_rows
        else:
            kept.append(batch)
    return kept


# --- files ---


def _scan(table: Table, path: Path, sessions: dict[int, SessionSummary]) -> list[StoredBatch]:
    """The batches of a file; adds it to the summary of its session."""
    with pa.memory_map(str(path)) as source:
        starts, end, gaps = _find_messages(source)
        try:
            start_step = _read_header(table, path, source)
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
        match = FILE_NAME.fullmatch(path.name)
        assert match is not None
        summary = sessions.setdefault(
            int(match[1]), SessionSummary(session=int(match[1]), start_step=start_step)
        )
        if summary.start_step != start_step:
            raise UnreadableLogError(
                f"{path} begins at step {start_step}, and other files of session "
                f"{summary.session} at step {summary.start_step}: they are of different runs, keep "
                "those of one."
            )
        batches: list[StoredBatch] = []
        num_rows = 0
        for start in starts:
            if start in gaps:
                _warn(path, f"in bytes {gaps[start]} to {start}, behind row {num_rows}")
            try:
                rounds = _read_batch(table, source, start, ROUND_COLUMNS)
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
                path,
                end,
                num_rows,
                num_unread_bytes,
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
    found = content.find(MESSAGE_START)
    while found >= 0:
        source.seek(position + found)
        try:
            if pa.ipc.read_message(source).type == "record batch":
                return position + found
        except (*DAMAGE, EOFError):
            pass
        found = content.find(MESSAGE_START, found + 1)
    return None


def _read_header(table: Table, path: Path, source: pa.NativeFile) -> int:
    """The step at which the file's session began; raises one of `DAMAGE` where it is damaged."""
    source.seek(0)
    schema = pa.ipc.open_stream(source).schema
    version = int(schema.metadata[b"version"])
    if version != table.version:
        raise UnreadableLogError(
            f"{path} is of version {version} of its table, and this swift-grpo-ext reads "
            f"{table.version}: use the version of swift-grpo-ext that wrote it."
        )
    if not schema.equals(table.schema):
        raise ValueError("other columns")
    return int(schema.metadata[b"start_step"])


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
    numbers_of: dict[Path, list[int]] = defaultdict(list)
    for number, batch in enumerate(batches):
        numbers_of[batch.path].append(number)
    read: list[pa.RecordBatch | None] = [None] * len(batches)
    for path, numbers in numbers_of.items():
        with pa.memory_map(str(path)) as source:
            for number in numbers:
                batch = batches[number]
                try:
                    rows = _read_batch(table, source, batch.offset, names)
                    if rows.num_rows != batch.num_rows:
                        raise ValueError(f"{rows.num_rows} rows, not {batch.num_rows}")
                    read[number] = rows
                except DAMAGE as e:
                    last = batch.first_row + batch.num_rows - 1
                    phase, step, round_number = batch.round
                    _warn(
                        path,
                        f"in rows {batch.first_row} to {last} ({phase} round {step}."
                        f"{round_number}; {e})",
                    )
    return read


def _read_batch(
    table: Table, source: pa.NativeFile, offset: int, columns: Iterable[str]
) -> pa.RecordBatch:
    """Raises one of `DAMAGE` where the batch is not what was written, as far as that shows."""
    indices = sorted(table.schema.get_field_index(name) for name in columns)
    options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
    source.seek(0)
    reader = pa.ipc.open_stream(source, options=options)
    source.seek(offset)
    batch = reader.read_next_batch().replace_schema_metadata()
    batch.validate(full=True)
    return batch


def _warn(path: Path, where: str) -> None:
    logger.warning(
        "%s is damaged %s: these rows are left out, and the others read. Restore it from a copy.",
        path,
        where,
    )
