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
samples count. A damaged file is left out whole; a warning names it.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from swift_grpo_ext.record.log import RecordFile, record_files
from swift_grpo_ext.record.rewards import REWARDS
from swift_grpo_ext.record.row import ROUND_COLUMNS, SAMPLES, SampleRow, Table, to_rows
from swift_grpo_ext.sampling.seeding import Phase

logger = logging.getLogger(__name__)

DAMAGE = (pa.ArrowException, OSError, ValueError, AttributeError)
"""What pyarrow raises where bytes, or columns, are not what was written."""


class RoundName(NamedTuple):
    """Names a round; sorts as tables of samples do."""

    phase: str
    step: int
    number: int


class RowGroup(NamedTuple):
    """Says where a file holds rows of one round."""

    file: RecordFile
    position: int
    """Its number in the file, which stays as rounds are added."""

    round: RoundName


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
    for file in record_files(table.folder(run_dir)):
        with suppress(FileNotFoundError):  # a bounded record has removed it since
            status = file.path.stat()
            for group in _row_groups(file, status.st_size, status.st_mtime_ns):
                groups_of[group.round].append(group)
                start_steps[file.session] = file.start_step
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
    try:
        footer = pq.read_metadata(file.path)
        columns = [footer.schema.column(i).path for i in range(footer.num_columns)]
        round_columns = [columns.index(name) for name in ROUND_COLUMNS]
        groups = []
        for position in range(footer.num_row_groups):
            row_group = footer.row_group(position)
            values = [row_group.column(at).statistics.min for at in round_columns]
            if None in values:
                raise ValueError(f"row group {position} does not name its round")
            groups.append(RowGroup(file, position, RoundName(*values)))
    except FileNotFoundError:
        raise
    except DAMAGE as e:
        _warn_of_damage(file, e)
        return []
    return groups


def _read_row_groups(
    table: Table, groups: Sequence[RowGroup], columns: set[str]
) -> dict[RowGroup, pa.Table]:
    """Return some columns of row groups, in the table's order; none of damaged files."""
    fields = [field for field in table.schema if field.name in columns]
    names = [field.name for field in fields]
    read: dict[RowGroup, pa.Table] = {}
    for file, of_file in groupby(sorted(groups), key=lambda group: group.file):
        try:
            source = pq.ParquetFile(file.path, page_checksum_verification=True)
            tables = {}
            for group in of_file:
                rows = source.read_row_group(group.position, columns=names)
                rows.validate(full=True)
                tables[group] = rows.cast(pa.schema(fields))
        except FileNotFoundError:  # a bounded record has removed it since
            continue
        except DAMAGE as e:
            _warn_of_damage(file, e)
            continue
        read |= tables
    return read


def _warn_of_damage(file: RecordFile, cause: Exception) -> None:
    logger.warning(
        "%s is damaged (%s): its rows are left out. Restore it from a copy.", file.path, cause
    )
