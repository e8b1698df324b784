"""Reads the tables of a run's record, all sessions as one. Pure.

**Each row once.** A session that was resumed from the checkpoint of optimizer step s supersedes, of
the sessions before it,

- `train` rounds of step s and later: a round bears the step at which it begins;
- `eval` rounds of steps after s: the evaluation at s ran after update s and before the checkpoint,
  and the resumed run need not evaluate there again;
- everything, if s is 0: such a run began anew;
- any round that it has rows of itself, such as one that it was resumed in the middle of. A round is
  replaced whole, never sample by sample, so that no group holds samples of two sessions.

A session that wrote no rows supersedes nothing. Scores count where they are of the session whose
samples count. A damaged file is left out whole; a warning names it. A file that the system cannot
read now (a file server's hiccup) is no damaged one: its rows are left out until it can.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from swift_grpo_ext.record.log import RecordFile, parse_name, record_files, without_merged
from swift_grpo_ext.record.tables import (
    DIVERSITY,
    REWARDS,
    ROUND_COLUMNS,
    SAMPLES,
    DiversityRow,
    SampleRow,
    Table,
    to_diversity,
    to_rows,
)
from swift_grpo_ext.sampling.seeding import Phase, RoundId

logger = logging.getLogger(__name__)

DAMAGE = (pa.ArrowException, OSError, ValueError, AttributeError)
"""pyarrow raises these where bytes, or columns, are not what was written; `AttributeError` where a
footer lacks statistics."""

Version = tuple[int, int]
"""A file's size and time in ns: of one version, the content is the same."""

Failed = dict[RecordFile, Version | None]
"""Files that were not read: the version that is damaged; None where another try may succeed."""


class RowGroup(NamedTuple):
    """Says where a file holds rows of one round."""

    file: RecordFile
    position: int
    """Its number in the file."""

    round: RoundId


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIndex:
    """Says where the rows that count are."""

    table: Table
    rounds: dict[RoundId, list[RowGroup]]
    """In order: `eval` before `train`, then by step and number."""

    failed: Failed = field(default_factory=dict)
    """What was left out of what was read; a file that is read leaves it. Each failure is told once
    while it stands there."""

    def read_rounds(
        self, names: Iterable[RoundId], columns: Sequence[str] | None = None
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
        read = _read_row_groups(self.table, all_groups, {*selected, *order}, self.failed)
        tables = []
        for groups in groups_of_rounds:
            rows = pa.concat_tables([read[group] for group in groups if group in read] or [empty])
            if order:
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
        OSError: its folder cannot be read.
    """
    return RunIndex(run_dir).refresh()[0]


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
    return RunIndex(run_dir).refresh()[1].read(columns, phase, steps)


def read_diversity(run_dir: str | os.PathLike[str]) -> list[DiversityRow]:
    """Return what the monitor measured in each round, in the order of the steps that log it; empty
    where it was not on."""
    return DiversityReader(run_dir).read()


def read_group(
    run_dir: str | os.PathLike[str], *, phase: Phase, step: int, number: int, group: int
) -> list[SampleRow]:
    """Return all completions of one group, by index and turn.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: the log holds no such group.
    """
    index = index_samples(run_dir)
    name = RoundId(phase, step, number)
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


class RunIndex:
    """Says where a run's rows are, again and again while it goes on: what has not changed is not
    looked at again."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = run_dir
        self._samples, self._rewards = TableIndex(SAMPLES, run_dir), TableIndex(REWARDS, run_dir)
        self._scored: dict[RoundId, tuple[list[RowGroup], list[RowGroup], list[RowGroup]]] = {}

    def refresh(self) -> tuple[SampleIndex, SampleIndex]:
        """Find the samples that count, and their scores; reads no rows.

        Raises:
            FileNotFoundError: the run has no sample log.
            OSError: its folder cannot be read.
        """
        if not self._samples.refresh():
            raise FileNotFoundError(
                f"{self._run_dir} has no samples: no round has been generated yet, or the training "
                "has --sample_log none."
            )
        self._rewards.refresh()
        before, self._scored = self._scored, {}
        for name, samples in self._samples.rounds.items():
            scores = self._rewards.rounds.get(name)
            if scores is not None:
                known = before.get(name)
                # Lists of a `TableIndex` never change in place: the same ones hold the same.
                if known is None or known[0] is not samples or known[1] is not scores:
                    sessions = {group.file.session for group in samples}
                    counted = [group for group in scores if group.file.session in sessions]
                    known = samples, scores, counted
                self._scored[name] = known
        scored = {name: counted for name, (_, _, counted) in self._scored.items() if counted}
        return (
            SampleIndex(table=SAMPLES, rounds=self._samples.rounds, failed=self._samples.unread),
            SampleIndex(table=REWARDS, rounds=scored, failed=self._rewards.unread),
        )


class DiversityReader:
    """Reads what the monitor measured, again and again while a run goes on: what has not changed is
    not read again."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._index = TableIndex(DIVERSITY, run_dir)
        self._known: dict[RoundId, tuple[list[RowGroup], list[DiversityRow]]] = {}
        self._lock = Lock()  # pages are made by several threads

    def read(self) -> list[DiversityRow]:
        """Return what `read_diversity` does."""
        with self._lock:
            self._index.refresh()
            index = SampleIndex(table=DIVERSITY, rounds=self._index.rounds)
            known = {name: k for name, k in self._known.items() if index.rounds.get(name) == k[0]}
            new = [name for name in index.rounds if name not in known]
            for name, rows in zip(new, index.read_rounds(new), strict=True):
                if rows.num_rows:  # else its file cannot be read now: the next call tries again
                    known[name] = index.rounds[name], to_diversity(rows)
            self._known = known
            found = [row for _, rows in known.values() for row in rows]
        return sorted(found, key=lambda r: (r.steps_done, r.round.phase == "eval", r.round.number))


class TableIndex:
    """Says where the rows of a table are that count.

    A file never changes, and most say in their names which round they hold: `refresh` lists the
    names, and opens the merged files that are new.
    """

    def __init__(self, table: Table, run_dir: str | os.PathLike[str]) -> None:
        self.rounds: dict[RoundId, list[RowGroup]] = {}
        """Never changed in place; nor are its lists."""

        self.unread: Failed = {}
        """For the indices that are made of this one: files whose rows were left out."""

        self._failed: Failed = {}
        """Files whose footers were."""

        self._folder = table.folder(run_dir)
        self._listed: set[RecordFile] = set()
        self._groups: dict[RecordFile, list[RowGroup]] = {}
        self._by_round: defaultdict[RoundId, dict[RecordFile, list[RowGroup]]]
        self._by_round = defaultdict(dict)
        """Those that do not count, too."""

        self.start_steps: dict[int, int] = {}
        """Those of the sessions that have rows."""

    def refresh(self) -> bool:
        """Look for what is new; return whether the folder is there.

        Raises:
            OSError: it cannot be listed.
        """
        try:
            paths = [*self._folder.iterdir()]
            is_there = True
        except FileNotFoundError:
            paths = []
            is_there = False
        listed = {file for path in paths if (file := parse_name(path))}
        changed = set[RoundId]()
        if listed != self._listed or self._failed:  # a file that failed may be whole now
            files = without_merged(listed)
            for file in self._groups.keys() - set(files):
                changed |= self._replace(file, None)
            for file in files:
                if file not in self._groups or file in self._failed:
                    changed |= self._look_at(file)
            self._listed = listed
        if changed:
            self._count(changed)
        return is_there

    def _look_at(self, file: RecordFile) -> set[RoundId]:
        """Find the rounds of a file that is new, or could not be read; return what changed."""
        if file.round is not None:  # its name says all; damage shows when its rows are read
            return self._replace(file, [RowGroup(file, 0, file.round)])
        try:
            if file in self._failed and self._failed[file] == version_of(file.path):
                return set()  # it is damaged still
            groups = _row_groups(file)
        except FileNotFoundError:  # a bounded record has removed it since
            return self._replace(file, None)
        except DAMAGE as e:
            _tell(file, e, self._failed)
            # What cannot be read now is what it was before.
            return set() if self._failed[file] is None else self._replace(file, [])
        self._failed.pop(file, None)
        return self._replace(file, groups)

    def _replace(self, file: RecordFile, groups: list[RowGroup] | None) -> set[RoundId]:
        """Take the row groups of a file in the place of those before; None where it is gone."""
        before = self._groups.pop(file, [])
        if groups is None:
            self._failed.pop(file, None)
            self.unread.pop(file, None)
        else:
            self._groups[file] = groups
        changed = {group.round for group in set(before).symmetric_difference(groups or ())}
        for name in changed:
            self._by_round[name].pop(file, None)
            if found := [group for group in groups or () if group.round == name]:
                self._by_round[name][file] = found
        return changed

    def _count(self, changed: set[RoundId]) -> None:
        """Decide anew which rows of some rounds count; of all where sessions came or went."""
        start_steps = {file.session: file.start_step for file, of in self._groups.items() if of}
        if start_steps != self.start_steps:
            self.start_steps, changed = start_steps, set(self._by_round)
        rounds = dict(self.rounds)
        for name in changed:
            rounds.pop(name, None)
            groups_of = self._by_round[name]
            if not groups_of:  # all its files are gone
                del self._by_round[name]
                continue
            # A round is replaced whole: only its latest session's rows can count. They do, unless a
            # later session began before that round, and has not generated it again.
            latest = max(file.session for file in groups_of)
            later = [step for session, step in start_steps.items() if session > latest]
            if not any(is_superseded(name.phase, name.step, step) for step in later):
                counted = sorted(file for file in groups_of if file.session == latest)
                rounds[name] = [group for file in counted for group in groups_of[file]]
        self.rounds = dict(sorted(rounds.items()))


def _row_groups(file: RecordFile) -> list[RowGroup]:
    """Return the row groups of a file from its footer; raises one of `DAMAGE`."""
    footer = pq.read_metadata(file.path)
    columns = [footer.schema.column(i).path for i in range(footer.num_columns)]
    round_columns = [columns.index(name) for name in ROUND_COLUMNS]
    groups = []
    for position in range(footer.num_row_groups):
        row_group = footer.row_group(position)
        values = [row_group.column(at).statistics.min for at in round_columns]
        if None in values:
            raise ValueError(f"row group {position} does not name its round")
        groups.append(RowGroup(file, position, RoundId(*values)))
    return groups


def _read_row_groups(
    table: Table, groups: Sequence[RowGroup], columns: set[str], failed: Failed
) -> dict[RowGroup, pa.Table]:
    """Return some columns of row groups, in the table's order; none of files that fail."""
    fields = [field for field in table.schema if field.name in columns]
    read: dict[RowGroup, pa.Table] = {}
    # Rounds of a page lie side by side in merged files: each file is opened once.
    for file, in_file in groupby(sorted(groups), key=lambda group: group.file):
        own = list(in_file)
        try:
            try:
                tables = _read_file(file, [group.position for group in own], fields)
            except FileNotFoundError:  # it was merged since, or a bounded record has removed it
                files = record_files(file.path.parent)
                merged = next((other for other in files if other.holds(file)), None)
                if merged is None:
                    continue
                positions = [file.first - merged.first + group.position for group in own]
                tables = _read_file(merged, positions, fields)
        except DAMAGE as e:
            _tell(file, e, failed)
            continue
        failed.pop(file, None)
        read |= zip(own, tables, strict=True)
    return read


def _read_file(
    file: RecordFile, positions: Sequence[int], fields: Sequence[pa.Field]
) -> list[pa.Table]:
    """Return some columns of a file's row groups; raises one of `DAMAGE`."""
    source = pq.ParquetFile(file.path, page_checksum_verification=True)
    # One by one, a merged file's 64 small row groups take four times as long.
    rows = source.read_row_groups(positions, columns=[field.name for field in fields])
    rows.validate(full=True)  # checksums cover pages, and neither their headers nor the footer
    rows = rows.cast(pa.schema(fields)).combine_chunks()
    sizes = [source.metadata.row_group(position).num_rows for position in positions]
    return [
        rows.slice(end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)
    ]


def version_of(path: Path) -> Version:
    """Return a file's version; raises OSError where the system cannot tell it."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _tell(file: RecordFile, cause: Exception, failed: Failed) -> None:
    """Remember that a file was not read, and warn of it, once."""
    # Of damage, Arrow tells in words alone; what the system reports has its number.
    version = None
    if not (isinstance(cause, OSError) and cause.errno):
        with suppress(OSError):
            version = version_of(file.path)
    if file in failed and failed[file] == version:
        return
    failed[file] = version
    if version is None:
        logger.warning(
            "%s cannot be read now (%s): its rows are left out until another try succeeds.",
            *(file.path, cause),
        )
    else:
        logger.warning(
            "%s is damaged (%s): its rows are left out. Restore it from a copy.", file.path, cause
        )
