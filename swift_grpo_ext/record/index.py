"""Which rows of a sample log count: each completion once, over all sessions. Pure.

A session that was resumed from the checkpoint of optimizer step s supersedes, of the sessions
before it,

- `train` rounds of step s and later: a round bears the step at which it begins;
- `eval` rounds of steps after s: the evaluation at s ran after update s and before the checkpoint,
  and the resumed run need not evaluate there again;
- everything, if s is 0: such a run began anew;
- any round that it has rows of itself, such as one that it was resumed in the middle of. A round is
  replaced whole, never sample by sample, so that no group holds samples of two sessions.

A session of which no whole batch was written supersedes nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from swift_grpo_ext.record.file import RoundName, StoredBatch, StoredFile, read_batches, scan_file
from swift_grpo_ext.record.log import FILE_NAME, samples_folder
from swift_grpo_ext.record.row import column_names

ORDER = ("group", "index", "turn")
"""Of the rows of a round."""


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

    rounds: dict[RoundName, list[StoredBatch]]
    """In order: `eval` before `train`, then by step and number."""

    sessions: list[SessionSummary]

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batches in self.rounds.values() for batch in batches)

    def read_rounds(
        self, names: Iterable[RoundName], columns: Sequence[str] | None = None
    ) -> list[pa.Table]:
        """The rows of each round, sorted by group, index and turn; opens each file once.

        Args:
            columns: names, in the order that the tables are to have; None for all.

        Raises:
            KeyError: there is no such round.
            ValueError: there is no such column, or a file is damaged.
        """
        wanted = column_names(columns)
        batches_of_rounds = [self.rounds[name] for name in names]
        flat = [batch for batches in batches_of_rounds for batch in batches]
        read = iter(read_batches(flat, {*wanted, *ORDER}))
        return [
            pa.Table.from_batches(list(islice(read, len(batches))))
            .sort_by([(column, "ascending") for column in ORDER])
            .select(wanted)
            for batches in batches_of_rounds
        ]


def index_samples(run_dir: str | os.PathLike[str]) -> SampleIndex:
    """Look where the rows are; reads no tokens or text.

    Raises:
        FileNotFoundError: the run has no sample log.
        ValueError: another version of swift-grpo-ext wrote it, a file is damaged, or the files of a
            session disagree about where it began.
    """
    folder = samples_folder(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} does not exist: {run_dir} is no output folder of a run that logged samples."
        )
    paths = sorted(path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name))
    files = [file for file in map(scan_file, paths) if file]
    sessions = _summarize(files)
    batches_of: dict[RoundName, list[StoredBatch]] = defaultdict(list)
    for file in files:
        for batch in file.batches:
            batches_of[batch.round].append(batch)
    current = {name: _current(name, batches_of[name], sessions) for name in sorted(batches_of)}
    return SampleIndex(
        rounds={name: batches for name, batches in current.items() if batches},
        sessions=[sessions[session] for session in sorted(sessions)],
    )


def _summarize(files: Iterable[StoredFile]) -> dict[int, SessionSummary]:
    sessions: dict[int, SessionSummary] = {}
    for file in files:
        new = SessionSummary(session=file.session, start_step=file.start_step)
        summary = sessions.setdefault(file.session, new)
        if summary.start_step != file.start_step:
            raise ValueError(
                f"{file.path} begins at step {file.start_step}, and other files of session "
                f"{file.session} at step {summary.start_step}: they are of different runs, keep "
                "those of one."
            )
        summary.num_files += 1
        summary.num_rows += sum(batch.num_rows for batch in file.batches)
        summary.num_unread_bytes += file.num_unread_bytes
    return sessions


def _current(
    name: RoundName, batches: Sequence[StoredBatch], sessions: dict[int, SessionSummary]
) -> list[StoredBatch]:
    """Those batches of a round that no later session superseded; counts the others."""
    latest = max(batch.session for batch in batches)
    starts = [s.start_step for s in sessions.values() if s.session > latest and s.num_rows]
    superseded = _superseded(name, starts)
    kept = []
    for batch in batches:
        if superseded or batch.session != latest:
            sessions[batch.session].num_superseded += batch.num_rows
        else:
            kept.append(batch)
    return kept


def _superseded(name: RoundName, later_starts: Iterable[int]) -> bool:
    """Whether a session that began at one of the steps replaced the round."""
    return any(
        start == 0 or name.step > start or (name.step == start and name.phase == "train")
        for start in later_starts
    )
