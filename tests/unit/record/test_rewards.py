"""Scores are recorded once, with the samples' names, over ranks and rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.record import rewards
from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.record.rewards import RewardRecorder, scores_of_ranks, training_scores
from swift_grpo_ext.record.tables import REWARDS, RewardRow
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from tests.rig.ranks import Gather, run_ranks
from tests.rig.record.rows import row_of, sample_id

FUNCTIONS, WEIGHTS = ["accuracy", "format"], [1.0, 0.5]


@dataclass
class Sample:
    """The fields of ms-swift's `OnPolicySample` that are read."""

    sample_id: SampleId
    is_truncated: bool = False
    advantages: Any = 0.0
    response_token_ids: Sequence[Any] = ()


def record(
    recorder: RewardRecorder,
    names: Sequence[SampleId],
    values: Sequence[Sequence[float]],
    gather: Gather = lambda rows: [rows],
) -> list[RewardRow]:
    samples = [Sample(name) for name in names]
    return scores_of_ranks(gather(recorder.record(samples, values, fate="trained", extras={})))


def test_all_that_is_known_of_a_sample(tmp_path: Path) -> None:
    name = sample_id(3, number=1, group=2, index=5)
    log = SampleLog(tmp_path, session=0, start_step=0)
    log.append([row_of(name)])
    rows = RewardRecorder(FUNCTIONS, WEIGHTS).record(
        [Sample(name, is_truncated=True)],
        [[0.25, 1.0]],
        fate="trained",
        extras={name: {"advantage": -0.5, "gap_mean": 0.125, "gap_max": 2.0, "gaps": [(3, 0.5)]}},
    )
    log.append(rows, REWARDS)
    log.flush()
    table = read_rewards(tmp_path)
    assert table.to_pylist() == [
        {
            **{"session": 0, "phase": "train", "step": 3, "number": 1, "group": 2, "index": 5},
            **{"reward": 0.75, "rewards": [("accuracy", 0.25), ("format", 1.0)]},
            **{"advantage": -0.5, "gap_mean": 0.125, "gap_max": 2.0},
            **{"truncated": True, "replaced": False, "fate": "trained", "gaps": [(3, 0.5)]},
        }
    ]
    assert table.schema == REWARDS.schema


def test_functions_that_gave_nothing_or_share_a_name() -> None:
    recorder = RewardRecorder(["judge", "form", "judge"], [1.0, 0.5, 0.25])
    names = [sample_id(0), sample_id(1)]
    some, none = record(recorder, names, [[math.nan, 1.0, 1.0], [math.nan] * 3])
    assert (some.reward, none.reward) == (0.75, None)
    assert some.rewards == [("judge", None), ("form", 1.0), ("judge_2", 1.0)]
    assert (some.advantage, some.gap_mean, some.fate) == (None, None, "trained")


def test_what_dynamic_sampling_drops_has_a_score() -> None:
    """Each of two ranks generates a group twice. ms-swift trains on groups 1 and 2, and rank 0 gets
    samples that rank 1 generated."""
    recorded: dict[int, list[RewardRow]] = {}

    def work(rank: int, gather: Gather) -> None:
        recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
        for number in (0, 1):
            names = [sample_id(group=2 * number + rank, index=i) for i in (0, 1)]
            recorder.generated([Sample(name) for name in names], [[number + rank / 10, 0.0]] * 2)
        trained = [sample_id(group=rank + 1, index=i) for i in (1, 0)]
        recorded[rank] = record(recorder, trained, [[9.0, 0.0]] * 2, gather=gather)
        # Nothing is left for the next round.
        later = [sample_id(1, index=rank)]
        assert len(record(recorder, later, [[5.0, 0.0]], gather=gather)) == 2

    run_ranks(2, work)
    found = {
        rank: [(r.sample_id.group, r.sample_id.index, r.reward, r.fate) for r in rows]
        for rank, rows in recorded.items()
    }
    fates = [(0, 0.0, "dropped"), (1, 9.0, "trained"), (2, 9.0, "trained"), (3, 1.1, "dropped")]
    of_all = [(group, i, reward, fate) for group, reward, fate in fates for i in (0, 1)]
    assert found == {0: of_all, 1: of_all}


def test_groups_that_got_another_prompt() -> None:
    recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
    recorder.replaced(RoundId("train", 0, 0), [1])
    recorder.replaced(RoundId("eval", 0, 0), [4])
    recorder.replaced(RoundId("train", 1, 0), [0])  # drawn ahead
    names = [
        [sample_id(group=g, index=i) for g in (0, 1) for i in (0, 1)],
        [sample_id(phase="eval", group=g) for g in (3, 4)],
        [sample_id(1, group=g) for g in (0, 1)],
        [sample_id(0, group=1)],
    ]
    recorded = [record(recorder, of, [[0.0, 0.0]] * len(of)) for of in names]
    assert [[row.replaced for row in rows] for rows in recorded] == [
        [False, False, True, True],
        [False, True],
        [True, False],
        [False],  # forgotten once its round was recorded
    ]


def test_what_training_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "MOST_GAPS", 2)
    first, second, third = (Sample(sample_id(index=i)) for i in range(3))
    first.response_token_ids, second.response_token_ids = [5, 6, 7, 8], [[5, 6], [7]]
    first.advantages, second.advantages = torch.tensor(0.5), torch.tensor(-1.5)
    batch = SimpleNamespace(
        rollout_per_token_logps=torch.tensor(
            [[9.0, -1.0, -2.0, -3.0, -4.0], [9.0, 9.0, 9.0, 9.0, -1.0]]
        ),
        old_per_token_logps=torch.tensor(
            [[0.0, -1.5, -1.0, -3.0625, -4.03125], [0.0, 0.0, 0.0, 0.0, -1.25]]
        ),
        completion_mask=torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]),
    )
    unknown = SimpleNamespace(rollout_per_token_logps=None, old_per_token_logps=torch.zeros(1, 1))
    scores = training_scores([first, second, third], [([first, second], batch), ([third], unknown)])
    assert scores == {
        first.sample_id: {
            **{"advantage": 0.5, "gap_mean": 0.3984375, "gap_max": 1.0},
            "gaps": [(0, 0.5), (1, 1.0)],  # positions in the completion; the greatest two
        },
        # It has more tokens than the training saw, so positions are not known.
        second.sample_id: {"advantage": -1.5, "gap_mean": 0.25, "gap_max": 0.25},
        third.sample_id: {"advantage": 0.0},
    }
    monkeypatch.setattr(rewards, "MOST_GAPS", 64)
    scores = training_scores([first, second], [([first, second], batch)])
    # A gap below `SHOWN_GAP` is left out.
    assert scores[first.sample_id]["gaps"] == [(0, 0.5), (1, 1.0), (2, 0.0625)]
