"""Reads the tables of a run's record, all sessions and ranks as one. Pure.

**Each row once.** A session that was resumed from the checkpoint of optimizer step s supersedes, of
the sessions before it,

- `train` rounds of step s and later: a round bears the step at which it begins;
- `eval` rounds of steps after s: the evaluation at s ran after update s and before the checkpoint,
  and the resumed run need not evaluate there again;
- everything, if s is 0: such a run began anew;
- any round that it has rows of itself, such as one that it was resumed in the middle of. A round is
  replaced whole, never sample by sample, so that no group holds samples of two sessions.

A session that wrote no rows supersedes nothing. Scores count where they are of the session whose
samples count. Files and row groups that are damaged are left out; a warning names them.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from swift_grpo_ext.record.log import RecordFile, read_footer, record_files
from swift_grpo_ext.record.rewards import REWARDS
from swift_grpo_ext.record.row import ROUND_COLUMNS, SAMPLES, SampleRow, Table, to_rows
from swift_grpo_ext.sampling.seeding import Phase

logger = logging.getLogger(__name__)

DAMAGE = (pa.ArrowException, OSError, ValueError, AttributeError)
"""What reading raises where bytes, or columns, are not what was written."""


class RoundName(NamedTuple):
    """Names a round; sorts as tables of samples do."""

    phase: str
    step: int
    number: int


class RowGroup(NamedTuple):
    """Says where a file holds rows of one round."""

    file: RecordFile
    position: int
    """Its number in the file."""

    round: RoundName
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIndex:
    """Says where the rows that count are."""

    table: Table
    rounds: dict[RoundName, list[RowGroup]]
    """In order: `eval` before `train`, then by step and number."""

    def read_rounds(
        self, names: Iterable[RoundName], columns: Sequence[str] | None = None
    ) -> list[pa.Table]:
        """Return the rows of each round, sorted by group, index and turn.

        Args:
            columns: names, in the order that the tables are to have; None for all.

        Raises:
            KeyError: there is no such round, or no such column.
        """
        empty = self.table.schema.empty_table()
        order = [name for name in ("group", "index", "turn") if name in empty.column_names]
        selected = empty.column_names if columns is None else list(columns)
        groups_of_rounds = [self.rounds[name] for name in names]
        all_groups = [group for groups in groups_of_rounds for group in groups]
        read = _read_row_groups(self.table, all_groups, {*selected, *order})
        tables = []
        for groups in groups_of_rounds:
            rows = pa.concat_tables([read[group] for group in groups if group in read] or [empty])
            rows = rows.sort_by([(name, "ascending") for name in order])
            tables.append(rows.select(selected))
        return tables

    def read(
        self,
        columns: Sequence[str] | None = None,
        phase: Phase | None = None,
        steps: range | None = None,
    ) -> pa.Table:
        """Return all rows, or those of a phase and some steps, as `read_samples` does."""
        empty = self.table.schema.empty_table()
        names = [
            name
            for name in self.rounds
            if phase in (None, name.phase) and (steps is None or name.step in steps)
        ]
        tables = self.read_rounds(names, columns)
        return pa.concat_tables([empty if columns is None else empty.select(columns), *tables])


def index_samples(run_dir: str | os.PathLike[str]) -> SampleIndex:
    """Find the samples that count; reads no rows.

    Raises:
        FileNotFoundError: the run has no sample log.
    """
    folder = SAMPLES.folder(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} does not exist: {run_dir} is no output folder of a run that logged samples."
        )
    return _index(SAMPLES, run_dir)


def index_rewards(samples: SampleIndex, run_dir: str | os.PathLike[str]) -> SampleIndex:
    """Find the scores of the samples that count; reads no rows."""
    rounds = {}
    for name, groups in _index(REWARDS, run_dir).rounds.items():
        sessions = {group.file.session for group in samples.rounds.get(name, ())}
        scored = [group for group in groups if group.file.session in sessions]
        if scored:
            rounds[name] = scored
    return SampleIndex(table=REWARDS, rounds=rounds)


def read_samples(
    run_dir: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    phase: Phase | None = None,
    steps: range | None = None,
) -> pa.Table:
    """Return the samples of a run, sorted by phase, step, number, group, index and turn.

    Args:
        columns: names, in the order that the table is to have; None for all.
        phase: None for both.
        steps: of the rounds; None for all.

    Raises:
        FileNotFoundError: the run has no sample log.
        KeyError: there is no such column.
    """
    return index_samples(run_dir).read(columns, phase, steps)


def read_rewards(
    run_dir: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    phase: Phase | None = None,
    steps: range | None = None,
) -> pa.Table:
    """Return how the samples of a run scored (`rewards.RewardRow`), sorted by phase, step, number,
    group and index; arguments and errors are those of `read_samples`."""
    return index_rewards(index_samples(run_dir), run_dir).read(columns, phase, steps)


def read_group(
    run_dir: str | os.PathLike[str], *, phase: Phase, step: int, number: int, group: int
) -> list[SampleRow]:
    """Return all completions of one group, by index and turn.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: the log holds no such group.
    """
    index = index_samples(run_dir)
    name = RoundName(phase, step, number)
    if name in index.rounds:
        [rows] = index.read_rounds([name])
        rows = rows.filter(pc.equal(rows["group"], group))
        if rows.num_rows:
            return to_rows(rows)
    steps = [known.step for known in index.rounds if known.phase == phase]
    span = f"{phase} steps {min(steps)} to {max(steps)}" if steps else f"no {phase} rounds"
    raise ValueError(
        f"{run_dir} holds no group {group} of {phase} round {step}.{number}; it has {span}."
    )


# --- which row groups count ---


def is_superseded(phase: str, step: int, start_step: int) -> bool:
    """Return True if a session that began at `start_step` replaces such rounds of earlier ones."""
    return start_step == 0 or step > start_step or (step == start_step and phase == "train")


def _index(table: Table, run_dir: str | os.PathLike[str]) -> SampleIndex:
    groups_of: defaultdict[RoundName, list[RowGroup]] = defaultdict(list)
    start_steps: dict[int, int] = {}
    num_read: defaultdict[tuple[int, int], int] = defaultdict(int)
    # Of files that begin alike, the longest comes first; those that were rolled into it are passed.
    files = sorted(record_files(table.folder(run_dir)), key=lambda file: (file.first, -file.last))
    try:
        for file in files:
            if file.last >= num_read[file.session, file.rank]:
                num_read[file.session, file.rank] = file.last + 1
                status = file.path.stat()
                for group in _row_groups(file, status.st_size, status.st_mtime_ns):
                    groups_of[group.round].append(group)
                    start_steps[file.session] = file.start_step
    except FileNotFoundError:  # a run that goes on has rolled it, or removed it: look again
        return _index(table, run_dir)
    rounds = {}
    for name, groups in sorted(groups_of.items()):
        latest = max(group.file.session for group in groups)
        later = [step for session, step in start_steps.items() if session > latest]
        if not any(is_superseded(name.phase, name.step, start_step) for start_step in later):
            rounds[name] = [group for group in groups if group.file.session == latest]
    return SampleIndex(table=table, rounds=rounds)


@lru_cache(maxsize=1 << 16)
def _row_groups(file: RecordFile, size: int, mtime_ns: int) -> list[RowGroup]:
    """Return the row groups of a file from its footer; none, with a warning, where it is damaged.

    Cached, as a viewer asks again for each new round: a file of this size and time is the same.
    """
    groups: list[RowGroup] = []
    first_row = 0
    try:
        footer = _read_footer(file)
        columns = [footer.schema.column(i).path for i in range(footer.num_columns)]
        round_columns = [columns.index(name) for name in ROUND_COLUMNS]
        for position in range(footer.num_row_groups):
            row_group = footer.row_group(position)
            values = [row_group.column(at).statistics.min for at in round_columns]
            num_rows = row_group.num_rows
            groups.append(RowGroup(file, position, RoundName(*values), first_row, num_rows))
            first_row += num_rows
    except FileNotFoundError:
        raise
    except DAMAGE as e:
        _warn_of_damage(file, "", e)
        return []
    return groups


# --- files ---


def _read_row_groups(
    table: Table, groups: Sequence[RowGroup], columns: set[str]
) -> dict[RowGroup, pa.Table]:
    """Return some columns of row groups, in the table's order; not those of damaged ones."""
    names = [name for name in table.schema.names if name in columns]
    read: dict[RowGroup, pa.Table] = {}
    for file, of_file in groupby(sorted(groups), key=lambda group: group.file):
        current = file
        if not file.path.exists():  # a run that goes on has rolled it, or removed it
            others = record_files(file.path.parent)
            current = next((other for other in others if other.holds(file)), file)
        try:
            footer = _read_footer(current)
            source = pq.ParquetFile(current.path, metadata=footer, page_checksum_verification=True)
        except FileNotFoundError:
            continue
        except DAMAGE as e:
            _warn_of_damage(file, "", e)
            continue
        for group in of_file:
            try:
                position = file.first - current.first + group.position
                rows = source.read_row_group(position, columns=names)
                rows.validate(full=True)
                read[group] = rows.cast(pa.schema([table.schema.field(name) for name in names]))
            except DAMAGE as e:
                last_row = group.first_row + group.num_rows - 1
                rows_of_file = f" in rows {group.first_row} to {last_row} of {group.round}"
                _warn_of_damage(file, rows_of_file, e)
    return read


def _read_footer(file: RecordFile) -> pq.FileMetaData:
    """Raises one of `DAMAGE` where the footer is not what was written."""
    with file.path.open("rb") as source:
        footer = read_footer(source)
    if zlib.crc32(footer) != file.footer_crc32:
        raise ValueError("the checksum of its footer is another")
    return pq.read_metadata(pa.BufferReader(footer))


def _warn_of_damage(file: RecordFile, where: str, cause: Exception) -> None:
    logger.warning(
        "%s is damaged%s (%s): its rows are left out, and the others read. Restore it from a copy.",
        *(file.path, where, cause),
    )
