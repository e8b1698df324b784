"""How samples scored: recorded once, with the samples' names, over ranks, rounds and sessions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.record import rewards
from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.reader import read_rewards
from swift_grpo_ext.record.rewards import REWARDS, RewardRecorder, RewardRow, training_scores
from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.cli import main
from tests.ranks import Gather, run_ranks
from tests.record.rows import ROW, sample_id, write_session

FUNCTIONS, WEIGHTS = ["accuracy", "format"], [1.0, 0.5]


@dataclass
class Sample:
    """The fields of ms-swift's `OnPolicySample` that are read."""

    sample_id: SampleId
    is_truncated: bool = False
    advantages: Any = 0.0
    response_token_ids: Sequence[Any] = ()


def samples_of(*sample_ids: SampleId, **fields: Any) -> list[Sample]:
    return [Sample(name, **fields) for name in sample_ids]


def alone(value: Any) -> list[Any]:
    return [value]


def record(
    run_dir: Path, *sample_ids: SampleId, session: int = 0, start_step: int = 0, reward: float = 1.0
) -> None:
    """Samples and their scores, both of one session."""
    with SampleLog(run_dir, session=session, start_step=start_step, rank=0) as log:
        log.append([replace(ROW, sample_id=name, seed=session) for name in sample_ids])
        recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
        values = [[reward, 0.0]] * len(sample_ids)
        recorder.record(
            log, samples_of(*sample_ids), values, fate="trained", extras={}, all_gather=alone
        )


def rows_of(run_dir: Path, *columns: str, **selection: Any) -> list[tuple[Any, ...]]:
    table = read_rewards(run_dir, columns=columns, **selection)
    return [tuple(row.values()) for row in table.to_pylist()]


def test_all_that_is_known_of_a_sample(tmp_path: Path) -> None:
    name = sample_id(3, number=1, group=2, index=5)
    write_session(tmp_path, [replace(ROW, sample_id=name)])
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0)
    recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
    recorder.record(
        log,
        samples_of(name, is_truncated=True),
        [[0.25, 1.0]],
        fate="trained",
        extras={name: {"advantage": -0.5, "gap_mean": 0.125, "gap_max": 2.0}},
        all_gather=alone,
    )
    assert read_rewards(tmp_path).to_pylist() == [
        {
            **{"phase": "train", "step": 3, "number": 1, "group": 2, "index": 5},
            **{"reward": 0.75, "rewards": [("accuracy", 0.25), ("format", 1.0)]},
            **{"advantage": -0.5, "gap_mean": 0.125, "gap_max": 2.0},
            **{"truncated": True, "replaced": False, "fate": "trained", "gaps": None},
        }
    ]


def test_what_must_be_known_of_a_sample(tmp_path: Path) -> None:
    record(tmp_path, sample_id())
    assert (tmp_path / "rewards/session-0000-rank-00000.arrows").is_file()
    schema = read_rewards(tmp_path).schema
    assert {field.name for field in schema if field.nullable} == {
        *("reward", "advantage", "gap_mean", "gap_max", "gaps")
    }


@pytest.mark.parametrize(
    ("values", "reward"),
    [([1.0, 1.0], 1.5), ([math.nan, 1.0], 0.5), ([1.0, math.nan], 1.0), ([math.nan] * 2, None)],
)
def test_a_function_that_gave_nothing(
    tmp_path: Path, values: list[float], reward: float | None
) -> None:
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0)
    log.append([ROW])
    RewardRecorder(FUNCTIONS, WEIGHTS).record(
        log, samples_of(ROW.sample_id), [values], fate="evaluated", extras={}, all_gather=alone
    )
    known = [None if math.isnan(value) else value for value in values]
    assert rows_of(tmp_path, "reward", "rewards", "advantage", "gap_mean", "fate") == [
        (reward, list(zip(FUNCTIONS, known, strict=True)), None, None, "evaluated")
    ]


def test_what_dynamic_sampling_drops_is_recorded_by_the_rank_that_drew_it(tmp_path: Path) -> None:
    """Each of two ranks draws a group, then another; ms-swift trains on group 1 and 2, and gives
    rank 0 the samples that rank 1 drew."""

    def work(rank: int, gather: Gather) -> None:
        recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
        names = [sample_id(group=2 * number + rank, index=i) for number in (0, 1) for i in (0, 1)]
        for number in (0, 1):
            own = names[2 * number : 2 * number + 2]
            recorder.drawn(samples_of(*own), [[number + rank / 10, 0.0]] * 2)
        with SampleLog(tmp_path, session=0, start_step=0, rank=rank) as log:
            log.append([replace(ROW, sample_id=name, rank=rank) for name in names])
            trained = samples_of(*(sample_id(group=rank + 1, index=i) for i in (0, 1)))
            recorder.record(
                log, trained, [[9.0, 0.0]] * 2, fate="trained", extras={}, all_gather=gather
            )
            # Nothing is left for the next round.
            later = sample_id(1, index=rank)
            log.append([replace(ROW, sample_id=later, rank=rank)])
            recorder.record(
                log, samples_of(later), [[5.0, 0.0]], fate="trained", extras={}, all_gather=gather
            )

    run_ranks(2, work)
    assert rows_of(tmp_path, "group", "index", "reward", "fate", steps=range(1)) == [
        (0, 0, 0.0, "dropped"),
        (0, 1, 0.0, "dropped"),
        (1, 0, 9.0, "trained"),
        (1, 1, 9.0, "trained"),
        (2, 0, 9.0, "trained"),
        (2, 1, 9.0, "trained"),
        (3, 0, pytest.approx(1.1), "dropped"),
        (3, 1, pytest.approx(1.1), "dropped"),
    ]
    assert rows_of(tmp_path, "index", "reward", steps=range(1, 2)) == [(0, 5.0), (1, 5.0)]


def test_functions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0)
    log.append([ROW])
    RewardRecorder(["judge", "form", "judge", "judge"], [1.0, 1.0, 1.0, 1.0]).record(
        log,
        samples_of(ROW.sample_id),
        [[1.0, 2.0, 3.0, 4.0]],
        fate="trained",
        extras={},
        all_gather=alone,
    )
    expected = [("judge", 1.0), ("form", 2.0), ("judge_2", 3.0), ("judge_3", 4.0)]
    assert rows_of(tmp_path, "rewards", "reward") == [(expected, 10.0)]


def test_groups_that_got_another_prompt(tmp_path: Path) -> None:
    recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
    recorder.replaced(Round(phase="train", step=0, number=0), [1])
    recorder.replaced(Round(phase="eval", step=0, number=0, first_group=4), [0])
    recorder.replaced(Round(phase="train", step=1, number=0), [0])  # drawn ahead
    log = SampleLog(tmp_path, session=0, start_step=0, rank=0)
    for names in (
        [sample_id(group=g, index=i) for g in (0, 1) for i in (0, 1)],
        [sample_id(phase="eval", group=g) for g in (3, 4)],
        [sample_id(1, group=g) for g in (0, 1)],
    ):
        log.append([replace(ROW, sample_id=name) for name in names])
        values = [[0.0, 0.0]] * len(names)
        recorder.record(
            log, samples_of(*names), values, fate="trained", extras={}, all_gather=alone
        )
    assert rows_of(tmp_path, "step", "group", "replaced", phase="train") == [
        (0, 0, False),
        (0, 0, False),
        (0, 1, True),
        (0, 1, True),
        (1, 0, True),
        (1, 1, False),
    ]
    assert rows_of(tmp_path, "group", "replaced", phase="eval") == [(3, False), (4, True)]


def test_a_resumed_session_replaces_scores_with_samples(tmp_path: Path) -> None:
    record(tmp_path, *(sample_id(step) for step in range(3)), reward=0.25)
    record(tmp_path, sample_id(1), session=1, start_step=1, reward=0.75)
    assert rows_of(tmp_path, "step", "reward") == [(0, 0.25), (1, 0.75)]
    # Samples that were drawn anew and not scored yet have no score of before.
    write_session(tmp_path, [replace(ROW, sample_id=sample_id(1))], session=2, start_step=1)
    assert rows_of(tmp_path, "step", "reward") == [(0, 0.25)]


def test_scores_of_an_earlier_version_of_the_plugin(tmp_path: Path) -> None:
    write_session(tmp_path, [ROW])
    assert rows_of(tmp_path, "reward") == []


def test_what_training_adds() -> None:
    import torch

    first, second, third = samples_of(*(sample_id(index=i) for i in range(3)))
    first.response_token_ids, second.response_token_ids = [5, 6], [[5, 6], [7]]
    first.advantages, second.advantages = torch.tensor(0.5), torch.tensor(-1.5)
    batch = SimpleNamespace(
        rollout_per_token_logps=torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 9.0, 9.0]]),
        old_per_token_logps=torch.tensor([[-1.5, -1.0, 7.0], [-1.25, 0.0, 0.0]]),
        completion_mask=torch.tensor([[1, 1, 0], [1, 0, 0]]),
    )
    unknown = SimpleNamespace(rollout_per_token_logps=None, old_per_token_logps=torch.zeros(1, 1))
    scores = training_scores([first, second, third], [[first, second], [third]], [batch, unknown])
    assert scores == {
        "train-0.0-0-0": {
            **{"advantage": 0.5, "gap_mean": 0.75, "gap_max": 1.0},
            "gaps": [(0, 0.5), (1, 1.0)],
        },
        # It has more tokens than training saw: their positions are not known.
        "train-0.0-0-1": {"advantage": -1.5, "gap_mean": 0.25, "gap_max": 0.25},
        "train-0.0-0-2": {"advantage": 0.0},
    }


def test_gaps_by_token_are_few_and_count_from_the_completions_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(rewards, "MOST_GAPS", 2)
    difference = torch.tensor([[0.0, 0.3, 0.04, 0.2, 0.5], [0.0, 0.0, 0.0, 0.05, 0.0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    assert rewards._greatest_gaps(difference, mask) == [
        [(0, pytest.approx(0.3)), (3, 0.5)],
        [(0, pytest.approx(0.05))],
    ]


def test_records_of_before_have_no_gaps_by_token(tmp_path: Path) -> None:
    older = REWARDS.older[1]
    table = replace(REWARDS, version=1, schema=older, stored=older)
    write_session(tmp_path, [replace(ROW, sample_id=sample_id(step)) for step in range(2)])
    with SampleLog(tmp_path, session=0, start_step=0, rank=0, table=table) as log:
        log.append([scored(sample_id(0))])
    with SampleLog(tmp_path, session=0, start_step=0, rank=1, table=REWARDS) as log:
        log.append([replace(scored(sample_id(1)), gaps=[(3, 0.5)])])
    assert rows_of(tmp_path, "step", "gaps") == [(0, None), (1, [(3, 0.5)])]


def scored(name: SampleId) -> RewardRow:
    return RewardRow(
        sample_id=name, reward=0.5, rewards=[], truncated=False, replaced=False, fate="trained"
    )


# --- swift-grpo-ext samples ---


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Rounds 0 and 1 of two samples with rewards 0.1 to 0.4; round 2 is not scored yet."""
    folder = tmp_path / "run"
    recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
    with SampleLog(folder, session=0, start_step=0, rank=0) as log:
        for step in range(3):
            names = [sample_id(step, index=i) for i in (1, 0)]
            log.append(
                [
                    replace(ROW, sample_id=replace(name, turn=turn), text=f"{step}-{name.index}")
                    for name in names
                    for turn in range(1 + (step == 1))
                ]
            )
            if step < 2:
                values = [[0.1 + 0.2 * step + 0.1 * name.index, 0.0] for name in names]
                recorder.record(
                    log, samples_of(*names), values, fate="trained", extras={}, all_gather=alone
                )
    return folder


def exported(run_dir: Path, *argv: str) -> list[dict[str, Any]]:
    output = run_dir.with_suffix(".jsonl")
    assert main(["samples", str(run_dir), "--output", str(output), *argv]) == 0
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def brief(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["step"], r["index"], r["turn"], r["reward"] and round(r["reward"], 3)) for r in rows]


ALL = [
    *((0, 0, 0, 0.1), (0, 1, 0, 0.2), (1, 0, 0, 0.3), (1, 0, 1, 0.3), (1, 1, 0, 0.4)),
    *((1, 1, 1, 0.4), (2, 0, 0, None), (2, 1, 0, None)),
]


def test_exports_hold_the_scores_of_every_turn(run_dir: Path) -> None:
    rows = exported(run_dir)
    assert brief(rows) == ALL
    assert rows[0]["reward_accuracy"] == pytest.approx(0.1)
    assert [r["reward_format"] for r in rows] == [0.0] * 6 + [None] * 2
    assert [r["fate"] for r in rows] == ["trained"] * 6 + [None] * 2
    assert [r["text"] for r in rows[:3]] == ["0-0", "0-1", "1-0"]
    output = run_dir.with_suffix(".parquet")
    assert main(["samples", str(run_dir), "--output", str(output), "--where", "step == 1"]) == 0
    table = pq.read_table(output)
    assert brief(table.to_pylist()) == ALL[2:6]
    assert table.schema.names[-4:] == ["fate", "gaps", "reward_accuracy", "reward_format"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--where", "reward > 0.15 and turn == 0"], [ALL[1], ALL[2], ALL[4]]),
        (["--where", "reward != reward"], []),
        (["--where", "text.str.contains('-1')", "--limit", "2"], [ALL[1], ALL[4]]),
        (["--where", "index == 1 and seed == 1", "--sort", "reward"], [*ALL[1:6:3], *ALL[5::2]]),
        (["--sort", "reward", "--limit", "1"], ALL[:1]),
        (["--sort", "reward", "--descending", "--limit", "3"], [*ALL[4:6], ALL[2]]),
        (["--limit", "3"], ALL[:3]),
        (["--limit", "0"], []),
        (["--sort", "reward_accuracy", "--where", "step < 1", "--descending"], ALL[1::-1]),
    ],
)
def test_rows_are_selected_and_sorted(
    run_dir: Path, argv: list[str], expected: list[tuple[Any, ...]]
) -> None:
    assert brief(exported(run_dir, *argv)) == expected


def test_seeds_are_compared_exactly(tmp_path: Path) -> None:
    seeds = [2**62 + 1, 2**62 + 2, None]
    rows = [replace(ROW, sample_id=sample_id(index=i), seed=seed) for i, seed in enumerate(seeds)]
    write_session(tmp_path / "run", rows)
    found = exported(tmp_path / "run", "--where", f"seed == {seeds[0]}")
    assert [row["seed"] for row in found] == seeds[:1]


def test_rows_are_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run_dir), "--sort", "reward", "--limit", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "       sample  reward  tokens  ended by  text",
        "train-0.0-0-0     0.1       3      stop  '0-0'",
    ]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["--where", "rewerd > 1"],
            r"--where 'rewerd > 1' cannot be read .*rewerd.*expected a con",
        ),
        (["--where", "step"], "--where 'step' cannot be read"),
        (["--sort", "rewerd"], r"--sort rewerd: expected one of \['phase'"),
    ],
)
def test_a_selection_that_is_none(
    run_dir: Path, argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(run_dir), *argv]) == 1
    message = capsys.readouterr().err
    assert re.search(error, message), message


def test_a_changed_score_is_left_out(tmp_path: Path) -> None:
    """Of booleans and maps too: what is read after a flipped bit is what was written."""
    record(tmp_path, *(sample_id(group=i) for i in range(3)))
    written = read_rewards(tmp_path).to_pylist()
    [path] = (tmp_path / "rewards").iterdir()
    data = path.read_bytes()
    counts = []
    for position in range(0, len(data), 97):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        read = read_rewards(tmp_path).to_pylist()
        assert read in ([], written), position
        counts.append(len(read))
    assert {*counts} == {0, 3}
