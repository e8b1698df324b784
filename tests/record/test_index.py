"""Sessions of one run: what was drawn again counts once, and groups are found; earlier layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree

import pytest

from swift_grpo_ext.record.log import claim_session
from swift_grpo_ext.record.reader import (
    RunIndex,
    read_diversity,
    read_group,
    read_rewards,
    read_samples,
)
from swift_grpo_ext.record.tables import DIVERSITY, REWARDS, RewardRow
from swift_grpo_ext.sampling.seeding import Phase, RoundId, SampleId
from tests.record.rows import diversity_row, open_log, row_of, sample_id, write_session

SCORE = RewardRow(
    sample_id=sample_id(), reward=0.5, rewards=[("Accuracy", 0.5)],
    truncated=False, replaced=False, fate="trained",
)  # fmt: skip

Session = tuple[int, list[SampleId]]
"""Step that it starts at, and the samples that it writes."""


def write(run_dir: Path, sessions: list[Session]) -> None:
    """Write rows whose seed is the number of their session."""
    for session, (start_step, sample_ids) in enumerate(sessions):
        rows = [row_of(p, seed=session) for p in sample_ids]
        write_session(run_dir, rows, session=session, start_step=start_step)


def train(*steps: int) -> list[SampleId]:
    return [sample_id(step) for step in steps]


def evaluate(*steps: int) -> list[SampleId]:
    return [sample_id(step, "eval") for step in steps]


@pytest.mark.parametrize(
    ("phase", "sessions", "expected"),
    [
        # What the resumed run has not reached again is gone all the same.
        ("train", [(0, train(0, 1, 2, 3)), (2, train(2))], [(0, 0), (1, 0), (2, 1)]),
        # A round that began before the checkpoint, and was resumed midway.
        ("train", [(0, train(0, 1, 2)), (2, train(1, 2))], [(0, 0), (1, 1), (2, 1)]),
        # Resumed from an earlier checkpoint than the session before was.
        ("train", [(0, train(0, 1, 2)), (2, train(2, 3)), (1, train(1))], [(0, 0), (1, 2)]),
        # A session without rows supersedes nothing.
        ("train", [(0, train(0, 1, 2)), (1, [])], [(0, 0), (1, 0), (2, 0)]),
        # A run that began anew has no rounds of another's, also where it has none of that phase.
        ("train", [(0, train(0, 1, 2)), (0, train(0))], [(0, 1)]),
        ("eval", [(0, evaluate(0, 2)), (0, train(0))], []),
        # Evaluated at 2, then saved: the resumed run does not evaluate there again.
        ("eval", [(0, evaluate(2, 4)), (2, [*train(2), *evaluate(4)])], [(2, 0), (4, 1)]),
        # With --eval_on_start it does.
        ("eval", [(0, evaluate(0, 2, 4)), (2, evaluate(2))], [(0, 0), (2, 1)]),
    ],
)
def test_rounds_count_once(
    tmp_path: Path, phase: Phase, sessions: list[Session], expected: list[tuple[int, int]]
) -> None:
    write(tmp_path, sessions)
    table = read_samples(tmp_path, columns=["step", "seed"], phase=phase)
    assert [(row["step"], row["seed"]) for row in table.to_pylist()] == expected


def test_a_round_is_replaced_whole(tmp_path: Path) -> None:
    """Also where the later session drew fewer turns or groups."""
    earlier = [
        sample_id(1, group=g, index=i, turn=t) for g in (0, 1) for i in (0, 1) for t in (0, 1)
    ]
    write(tmp_path, [(0, earlier), (2, [sample_id(1, index=0), sample_id(1, index=1)])])
    table = read_samples(tmp_path, columns=["group", "index", "turn", "seed"])
    assert [tuple(row.values()) for row in table.to_pylist()] == [(0, 0, 0, 1), (0, 1, 0, 1)]


def test_phase_and_steps_are_chosen(tmp_path: Path) -> None:
    write_session(tmp_path, [row_of(p) for p in train(0, 1, 2, 9) + evaluate(1)])
    table = read_samples(tmp_path, columns=["phase", "step"], steps=range(1, 3))
    found = [tuple(row.values()) for row in table.to_pylist()]
    assert found == [("eval", 1), ("train", 1), ("train", 2)]
    table = read_samples(tmp_path, columns=["step"], phase="train", steps=range(5, 100))
    assert table["step"].to_pylist() == [9]


def test_a_group_comes_from_all_ranks(tmp_path: Path) -> None:
    write_session(tmp_path, [row_of(sample_id(3))])
    rows = [
        row_of(sample_id(4, group=group, index=index, turn=turn), rank=index // 2)
        for group in (0, 1)
        for index in range(4)
        for turn in (0, 1)
    ]
    for rank in (1, 0):
        own = [row for row in rows if row.rank == rank]
        write_session(tmp_path, own[::-1], session=1, start_step=4, rank=rank)
    assert read_group(tmp_path, phase="train", step=4, number=0, group=1) == rows[8:]
    for step, group in ((4, 9), (5, 0)):
        message = f"holds no group {group} of train round {step}.0; it has train steps 3 to 4"
        with pytest.raises(ValueError, match=message):
            read_group(tmp_path, phase="train", step=step, number=0, group=group)
    with pytest.raises(ValueError, match="it has no eval rounds"):
        read_group(tmp_path, phase="eval", step=4, number=0, group=0)


# --- runs of version 0.1.0 ---

EARLIER = Path(__file__).parent / "earlier_run"
"""Rounds 0 and 1, an evaluation at 2, rounds 2 and 3, then anew from the checkpoint of step 2 on;
files of up to three rounds. A sample's seed and reward are its session."""

ROUNDS = [("eval", 2, 0), ("train", 0, 0), ("train", 1, 0), ("train", 2, 1), ("train", 3, 1)]
"""Phase, step and session of those that count."""


def rounds_of(run_dir: Path, start: int | None = None) -> list[tuple[str, int, int]]:
    """What each table holds of a run that was resumed from step `start`, in session 2."""
    expected = [r for r in ROUNDS if start is None or r[1] < start or r == ("eval", start, 0)]
    expected += [] if start is None else [("train", start, 2)]
    columns = ["phase", "step", "seed", "group"]
    samples = read_samples(run_dir, columns=columns).to_pylist()
    assert [tuple(row.values()) for row in samples] == [(*r, g) for r in expected for g in (0, 1)]
    scores = read_rewards(run_dir, columns=["phase", "step", "reward"]).to_pylist()
    assert [tuple(row.values()) for row in scores] == [r for r in expected for _ in (0, 1)]
    rows = read_diversity(run_dir)
    return [(*row.round[:2], row.num_pairs) for row in rows]


def test_earlier_runs_are_read() -> None:
    assert rounds_of(EARLIER) == [ROUNDS[1], ROUNDS[2], ROUNDS[0], *ROUNDS[3:]]
    assert read_group(EARLIER, phase="train", step=3, number=0, group=1) == [
        row_of(sample_id(3, group=1), seed=1)
    ]
    [first, *_] = read_diversity(EARLIER)
    assert first == diversity_row(0, num_pairs=0)


def test_an_earlier_run_is_resumed(tmp_path: Path) -> None:
    """Its files stay as they are, and what is generated again counts once."""
    copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    assert claim_session(tmp_path) == 2
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    log = open_log(tmp_path, session=2, start_step=3, max_bytes=10**6)
    names = [sample_id(3, group=group) for group in (0, 1)]
    log.append([row_of(name, seed=2) for name in names])
    log.append([replace(SCORE, sample_id=name, reward=2.0) for name in names], REWARDS)
    log.append([diversity_row(3, num_pairs=2)], DIVERSITY)
    log.finish()
    assert rounds_of(tmp_path, 3) == [ROUNDS[1], ROUNDS[2], ROUNDS[0], ROUNDS[3], ("train", 3, 2)]
    assert all(path.read_bytes() == content for path, content in before.items())
    log = open_log(tmp_path, session=2, start_step=3, max_bytes=1)
    log.append([row_of(sample_id(4))])
    log.flush()
    assert read_samples(tmp_path, columns=["step"])["step"].to_pylist() == [4]


def test_an_earlier_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    """Version 0.1.0 replaces its newest file."""
    folder = tmp_path / "samples"
    folder.mkdir()
    first, second = sorted((EARLIER / "samples").glob("session-0000-*"))
    copy(second, folder / first.name)
    index = RunIndex(tmp_path)
    assert [name.step for name in index.refresh()[0].rounds] == [2, 3]
    copy(first, folder / "new")
    (folder / "new").replace(folder / first.name)
    assert [tuple(name)[:2] for name in index.refresh()[0].rounds] == [
        ("eval", 2), ("train", 0), ("train", 1),
    ]  # fmt: skip


# --- what the monitor measured ---


def test_diversity_comes_back_in_the_order_of_steps(tmp_path: Path) -> None:
    assert read_diversity(tmp_path) == []
    rich = {
        "metrics": {"vendi": 0.1, "数字": float("inf")},
        "collisions": [{"kind": "shared", "samples": [{"rank": 0, "seed": None}], "bits": 0.1}],
        "worst_groups": [3, 1],
        "remedy": "remedy_collapse",
        "alarm": "数字 <>",
    }
    first = [diversity_row(0, **rich), diversity_row(1, "eval"), diversity_row(1)]
    batch = diversity_row(1, "eval", num_samples=2)  # an evaluation has a row for each
    log = open_log(tmp_path)
    for row in (*first, batch, diversity_row(2)):
        log.append([row], DIVERSITY)
    log.flush()
    assert read_diversity(tmp_path) == [first[0], first[1], batch, first[2], diversity_row(2)]
    log.finish()
    assert read_diversity(tmp_path) == [first[0], first[1], batch, first[2], diversity_row(2)]
    resumed = open_log(tmp_path, session=1, start_step=1)
    resumed.append([again := diversity_row(1, num_samples=7)], DIVERSITY)
    resumed.flush()
    assert read_diversity(tmp_path) == [first[0], first[1], batch, again]


def test_earlier_lines_that_are_damaged_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark, *lines = (EARLIER / "diversity.jsonl").read_bytes().splitlines(keepends=True)[:4]
    spoilt = [b"\xff\xfe\n", b"[1]\n", b"\n", b"{}}\n", b'{"start_step": "x"}\n', b'{"phase": 1}\n']
    spoilt += [lines[0].replace(b'"step": ', b'"x": 3, "step": '), lines[0].replace(b"lth", b"")]
    path = tmp_path / "diversity.jsonl"
    path.write_bytes(b"".join([mark, *spoilt, *lines, lines[0][:9]]))
    assert [row.round for row in read_diversity(tmp_path)] == [
        RoundId("train", 0, 0), RoundId("train", 1, 0), RoundId("eval", 2, 0),
    ]  # fmt: skip
    assert caplog.messages == [
        f"{path}: the lines 2, 3, 5, 6, 7 and 3 more are damaged or incomplete, and are left out."
    ]
