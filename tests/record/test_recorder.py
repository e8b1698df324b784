"""How what a rollout returned is written down, and shown to listeners."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.reader import read_samples
from swift_grpo_ext.record.recorder import SampleRecorder
from swift_grpo_ext.record.row import SampleRow, to_rows
from swift_grpo_ext.rollout.generate import to_rollout_output
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.rollout.wire import Completion
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from tests.ranks import ThreadRanks, run_rank_groups

FIRST = SampleId(phase="train", step=3, number=1, group=2, index=0)


def ids(*indices: int, group: int = 2) -> list[SampleId]:
    return [replace(FIRST, group=group, index=index) for index in indices]


def record(
    recorder: SampleRecorder, sample_ids: list[SampleId], *, num_ranks: int = 1, lost: int = 0
) -> None:
    outputs = []
    for number, name in enumerate(sample_ids):
        completion = Completion(
            text=str(name),
            token_ids=[number, 5],
            logprobs=[-0.5, -0.25],
            finish_reason="stop",
            seed=9,
            replica=f"replica {number}",
        )
        outputs.append(to_rollout_output(completion, [1, 2]))
    recorder.record(
        sample_ids,
        [OnPolicySample([{"role": "user", "content": "Which digit?"}]) for _ in sample_ids],
        [f"print {number}" for number in range(len(sample_ids))],
        outputs[lost:],
        num_ranks=num_ranks,
        weight_version=2,
    )
    recorder.flush()


def read(folder: Path) -> list[SampleRow]:
    return sorted(to_rows(read_samples(folder)), key=lambda row: row.sample_id)


def test_each_rank_writes_its_own_samples(tmp_path: Path) -> None:
    """With rank, replica and seed as they were, in one session's files."""
    heard: list[list[SampleRow]] = []

    def work(ranks: ThreadRanks) -> None:
        recorder = SampleRecorder(str(tmp_path), ranks, 42)
        recorder.listeners.append(heard.append)
        for _ in range(2):  # again is harmless
            recorder.open(start_step=3)
        record(recorder, ids(0, 1, group=ranks.rank))

    run_rank_groups(2, work)
    rows = read(tmp_path)
    assert [row.sample_id for row in rows] == [*ids(0, 1, group=0), *ids(0, 1, group=1)]
    assert [row.rank for row in rows] == [0, 0, 1, 1]
    assert [row.replica for row in rows] == ["replica 0", "replica 1"] * 2
    assert [row.seed for row in rows] == [sample_seed(42, row.sample_id) for row in rows]
    assert [row.fingerprint for row in rows] == ["print 0", "print 1"] * 2
    assert {row.weight_version for row in rows} == {2}
    assert [row.logprobs for row in rows] == [[-0.5, -0.25]] * 4
    assert [row.text for row in rows] == [str(row.sample_id) for row in rows]
    files = record_files(tmp_path / "samples")
    assert [(f.session, f.start_step, f.rank) for f in files] == [(0, 3, 0), (0, 3, 1)]
    told = sorted((row for rows in heard for row in rows), key=lambda row: row.sample_id)
    assert told == rows


def test_another_session_has_another_number_that_rank_0_takes(tmp_path: Path) -> None:
    for session in range(2):

        def work(ranks: ThreadRanks, session: int = session) -> None:
            recorder = SampleRecorder(str(tmp_path), ranks, None)
            recorder.open(start_step=session)
            if ranks.rank == 1:  # rank 0 has no rows yet
                record(recorder, ids(session))

        run_rank_groups(2, work)
    files = record_files(tmp_path / "samples")
    assert [(f.session, f.start_step, f.rank) for f in files] == [(0, 0, 1), (1, 1, 1)]
    assert {row.seed for row in read(tmp_path)} == {None}


def test_one_rank_writes_for_all(tmp_path: Path) -> None:
    """With `--async_generate`, rank 0 generates the samples of all ranks in order."""
    recorder = SampleRecorder(str(tmp_path), SingleRank(), 42)
    recorder.open(start_step=0)
    # A server's scheduler may make several training samples of one, which have no names.
    record(recorder, ids(6, 7), lost=1)
    assert record_files(tmp_path / "samples") == []
    record(recorder, ids(*range(6)), num_ranks=3)
    assert [row.rank for row in read(tmp_path)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kept", ["tokens", "none"])
def test_what_the_sample_log_keeps(kept: str, tmp_path: Path) -> None:
    heard: list[list[SampleRow]] = []
    recorder = SampleRecorder(str(tmp_path), SingleRank(), 42, kept=kept)
    recorder.listeners.append(heard.append)
    recorder.open(start_step=0)
    record(recorder, ids(0, 1))
    assert [row.logprobs for row in heard[0]] == [[-0.5, -0.25]] * 2  # the monitor needs them
    if kept == "tokens":
        assert [row.logprobs for row in read(tmp_path)] == [None] * 2
    else:
        assert list(tmp_path.iterdir()) == []


def test_the_bound_is_shared_by_the_ranks(tmp_path: Path) -> None:
    def work(ranks: ThreadRanks) -> None:
        recorder = SampleRecorder(str(tmp_path), ranks, 42, max_gb=1e-9)
        recorder.open(start_step=0)
        for number in range(3):
            record(recorder, ids(number, group=ranks.rank))

    run_rank_groups(2, work)
    assert [row.sample_id for row in read(tmp_path)] == [*ids(2, group=0), *ids(2, group=1)]
