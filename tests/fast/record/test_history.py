"""Each row is read once, as it was written (V1): over sessions that are killed, fail, are bounded
or resumed, and files that are merged or removed.

The test compares a model in Python, a list of rounds, with the rows that DuckDB reads.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift_grpo_ext.record import log as sample_log
from swift_grpo_ext.record.log import SampleLog, claim_session, record_files
from swift_grpo_ext.record.query import read_rewards, read_samples
from swift_grpo_ext.record.tables import REWARDS, SAMPLES, SampleRow, Table, to_rows
from swift_grpo_ext.sampling.seeding import PHASES, RoundId
from tests.rig.record.rows import ROW, open_log, score_of

# --- what happens to a run ---

WORDS = st.text("a七😀\n\0'\"\\", max_size=9)
LOGPROBS = st.integers(-(2**24), 0).map(lambda n: n / 512) | st.just(-float("inf"))
TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROBS, st.booleans()), max_size=4)


@st.composite
def some_rows(draw: st.DrawFn) -> list[SampleRow]:
    """Draw rows of one round; `Session.rounds` has its name."""
    places = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
    rows = []
    for group, index, turn in draw(st.lists(places, min_size=1, max_size=3, unique=True)):
        tokens = draw(TOKENS)
        changes = {
            "sample_id": replace(ROW.sample_id, group=group, index=index, turn=turn),
            "seed": draw(st.none() | st.integers(0, 2**63 - 1)),
            "token_ids": [token for token, _, _ in tokens],
            "logprobs": draw(st.sampled_from([None, [logprob for _, logprob, _ in tokens]])),
            "mask": draw(st.sampled_from([None, [is_trained for _, _, is_trained in tokens]])),
            **{name: draw(WORDS) for name in ("text", "prompt", "replica", "fingerprint")},
            **{name: draw(st.none() | WORDS) for name in ("finish_reason", "stop_reason")},
            "media": draw(st.lists(WORDS, max_size=2)),
        }
        rows.append(replace(ROW, **changes))
    return rows


NAMES = st.tuples(st.sampled_from(PHASES), st.integers(0, 3), st.integers(0, 1))
ROUNDS = st.dictionaries(NAMES.map(lambda name: RoundId(*name)), some_rows(), max_size=6)


class Fault(NamedTuple):
    """A call of the disk that fails once, or with which the process dies."""

    call: str
    number: int
    kills: bool


CALLS = {"write_table": pq.ParquetWriter, "fsync": os, "replace": Path, "unlink": Path}
SOUND = Fault("none", 0, False)
FAULTS = st.builds(Fault, st.sampled_from([*CALLS]), st.integers(1, 6), st.booleans())


@dataclass
class Session:
    start_step: int
    rounds: dict[RoundId, list[SampleRow]]
    rounds_a_call: int
    is_scored: bool
    max_bytes: int | None
    ends_whole: bool  # False if it is killed between two rounds: its small files stay
    fault: Fault


SESSIONS = st.builds(
    Session,
    start_step=st.integers(0, 3),
    rounds=ROUNDS,
    rounds_a_call=st.integers(1, 3),
    is_scored=st.booleans(),
    max_bytes=st.none() | st.integers(1, 30_000),
    ends_whole=st.booleans(),
    fault=st.just(SOUND) | FAULTS,
)


class Killed(BaseException):
    """Ends the writer's thread where SIGKILL would: nothing is tidied up."""


@contextmanager
def disk_with(fault: Fault) -> Iterator[None]:
    num_left, is_dead = fault.number, False

    def failing(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_left, is_dead
            num_left -= name == fault.call
            if is_dead or (name == fault.call and num_left == 0):
                is_dead = fault.kills
                raise Killed if is_dead else OSError(errno.EIO, os.strerror(errno.EIO))
            return own(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sample_log, "FILES", 2)
        for name, owner in CALLS.items():
            patched.setattr(owner, name, failing(name, getattr(owner, name)))
        yield


# --- the model ---

Key = tuple[int, RoundId]  # a session's number and a round


class Run:
    """A run's folder, and the rounds that it has to hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[Key, list[SampleRow]] = {}
        self.start_steps: dict[int, int] = {}
        # Those on disk, in the order in which they were written.
        self.samples: list[Key] = []
        self.scores: list[Key] = []
        self.in_flight: list[Key] = []

    def on_disk(self, table: Table) -> set[Key]:
        files = [file.path for file in record_files(table.folder(self.folder))]
        columns = ["session", "phase", "step", "number"]
        rows = [row for path in files for row in pq.read_table(path, columns=columns).to_pylist()]
        return {(row.pop("session"), RoundId(**row)) for row in rows}

    def train(self, session: Session) -> None:
        number = claim_session(self.folder)
        while sample_log._held:  # as the end of a process does
            os.close(sample_log._held.popitem()[1])
        for table in (SAMPLES, REWARDS):  # nothing is left of merges that died
            left = {*table.folder(self.folder).glob("*.[pt]*")}
            assert left == {file.path for file in record_files(table.folder(self.folder))}
        self.start_steps[number] = session.start_step
        place = {"session": number, "start_step": session.start_step}
        log = open_log(self.folder, **place, max_bytes=session.max_bytes)
        with disk_with(session.fault):
            with suppress(Killed):
                self.write(log, number, session)
            log.writer.shutdown()
        self.samples = self.kept(SAMPLES, self.samples, session)
        self.scores = self.kept(REWARDS, self.scores, session)
        if session.max_bytes and self.samples and session.fault == SOUND:
            files = [p for t in (SAMPLES, REWARDS) for p in t.folder(self.folder).glob("*.parquet")]
            is_bounded = sum(path.stat().st_size for path in files) <= session.max_bytes
            assert is_bounded or len(files) <= 2 or not session.rounds

    def write(self, log: SampleLog, number: int, session: Session) -> None:
        names, self.in_flight = [*session.rounds], []
        while names:
            call, names = names[: session.rounds_a_call], names[session.rounds_a_call :]
            rows = [
                replace(row, sample_id=replace(row.sample_id, **name._asdict()))
                for name in call
                for row in session.rounds[name]
            ]
            rows = rows[::2] + rows[1::2]  # rounds may be mixed
            for row in rows:
                self.rows.setdefault((number, row.sample_id.round), []).append(row)
            self.in_flight = [(number, name) for name in {r.sample_id.round: 0 for r in rows}]
            self.samples += self.in_flight
            log.append(rows)
            if session.is_scored:
                self.scores += self.in_flight
                scored = {replace(row.sample_id, turn=0): 0 for row in rows}
                log.append([score_of(name, float(number)) for name in scored], REWARDS)
            log.flush()
            self.in_flight = []
        # What waits for a disk that failed is only written by a later call.
        if session.ends_whole or (session.fault != SOUND and not session.fault.kills):
            log.finish()

    def kept(self, table: Table, written: list[Key], session: Session) -> list[Key]:
        """Check that only what was in flight, and the oldest beyond a bound, is gone."""
        found = self.on_disk(table)
        is_kept = [key in found for key in written if key not in self.in_flight]
        assert is_kept == (sorted(is_kept) if session.max_bytes else [True] * len(is_kept))
        # The newest file stays, however small the bound.
        assert is_kept[-1:] != [False] or found & {*self.in_flight}
        assert found <= {*written}
        return [key for key in written if key in found]

    def counts(self, key: Key) -> bool:
        """Return whether no later session supersedes the round, by the rule of the module."""
        number, (phase, step, _) = key
        later = [other for other in self.samples if other[0] > number]
        return not any(
            round_ == key[1]
            or (start := self.start_steps[session]) == 0
            or step > start
            or (step == start and phase == "train")
            for session, round_ in later
        )


STEPS = {RoundId(phase, step, 0): [ROW] for step in range(4) for phase in PHASES}
WHOLE = Session(0, STEPS, 1, True, None, True, SOUND)
RESUMED = replace(WHOLE, start_step=2, rounds={RoundId("train", 3, 0): [ROW]})
DIES_IN_A_MERGE = replace(WHOLE, fault=Fault("unlink", 2, True))


@settings(max_examples=40)
@given(st.lists(SESSIONS, max_size=3), st.lists(st.integers(0, 100), max_size=3))
@example([WHOLE, RESUMED], [])
@example([DIES_IN_A_MERGE] * 2, [])
def test_each_row_counts_once(sessions: list[Session], removed: list[int]) -> None:
    with TemporaryDirectory() as folder:
        run = Run(Path(folder))
        SAMPLES.folder(folder).mkdir()
        for session in sessions:
            run.train(session)
        for number in removed:
            files = [f.path for t in (SAMPLES, REWARDS) for f in record_files(t.folder(folder))]
            for path in files[number % max(len(files), 1) :][:1]:
                path.unlink()
        sound, scored = run.on_disk(SAMPLES), run.on_disk(REWARDS)
        run.samples = [key for key in run.samples if key in sound]
        counted = [key for key in run.samples if run.counts(key)]
        rows = [row for key in counted for row in run.rows[key]]
        assert to_rows(read_samples(folder)) == sorted(rows, key=lambda row: row.sample_id)
        columns = ["phase", "step", "number", "group", "index", "reward"]
        found = read_rewards(folder, columns=columns)
        expected = {
            (*(name := row.sample_id).round, name.group, name.index, float(key[0]))
            for key in counted
            if key in scored
            for row in run.rows[key]
        }
        assert [tuple(row.values()) for row in found.to_pylist()] == sorted(expected)
