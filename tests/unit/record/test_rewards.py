"""Each sample has one score in the record, with all that is known of it (V1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from swift.rl_core.data import GRPOBatch

from swift_grpo_ext.record import rewards
from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.record.rewards import RewardRecorder, scores_of_ranks, training_scores
from swift_grpo_ext.record.tables import REWARDS, RewardRow
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from tests.rig.ranks import Gather, run_ranks
from tests.rig.record.rows import open_log, row_of, sample_id

FUNCTIONS, WEIGHTS = ["accuracy", "format"], [1.0, 0.5]


def sample(name: SampleId, **fields: Any) -> RolloutSample:
    made = RolloutSample(messages=[], **fields)
    made.sample_id = name
    return made


def record(
    recorder: RewardRecorder,
    names: Sequence[SampleId],
    values: Sequence[Sequence[float]],
    gather: Gather = lambda rows: [rows],
) -> list[RewardRow]:
    samples = [sample(name) for name in names]
    return scores_of_ranks(gather(recorder.record(samples, values, fate="trained", extras={})))


def test_all_that_is_known_of_a_sample(tmp_path: Path) -> None:
    """A function may give nothing. Two functions may share a name."""
    recorder = RewardRecorder(["judge", "form", "judge"], [1.0, 0.5, 0.25])
    name, other = sample_id(3, number=1, group=2, index=5), sample_id(4)
    known = {"advantage": -0.5, "gap_mean": 0.125, "gap_max": 2.0, "gaps": [(3, 0.5)]}
    samples = [sample(name, finish_reason="length"), sample(other)]
    values = [[math.nan, 1.0, 1.0], [math.nan] * 3]
    rows = recorder.record(samples, values, fate="trained", extras={name: known})
    rewards_of_name = [("judge", None), ("form", 1.0), ("judge_2", 1.0)]
    expected = {
        **{"reward": 0.75, "rewards": rewards_of_name, **known},
        **{"truncated": True, "replaced": False, "fate": "trained"},
    }
    assert rows[0] == RewardRow(sample_id=name, **expected)
    assert (rows[1].reward, rows[1].advantage, rows[1].truncated) == (None, None, False)
    log = open_log(tmp_path)
    log.append([row_of(name)])
    log.append(rows, REWARDS)
    log.flush()
    table = read_rewards(tmp_path)
    assert table.select([*expected]).to_pylist() == [expected]
    assert table.schema == REWARDS.schema


def test_what_dynamic_sampling_drops_has_a_score() -> None:
    """Each of two ranks generates a group twice. ms-swift trains on groups 1 and 2, and rank 0 gets
    samples that rank 1 generated."""

    def work(rank: int, gather: Gather) -> list[tuple[int, int, float | None, str]]:
        recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
        for number in (0, 1):
            names = [sample_id(group=2 * number + rank, index=i) for i in (0, 1)]
            recorder.generated([sample(name) for name in names], [[number + rank / 10, 0.0]] * 2)
        trained = [sample_id(group=rank + 1, index=i) for i in (1, 0)]
        rows = record(recorder, trained, [[9.0, 0.0]] * 2, gather=gather)
        # Nothing is left for the next round.
        later = [sample_id(1, index=rank)]
        assert len(record(recorder, later, [[5.0, 0.0]], gather=gather)) == 2
        return [(r.sample_id.group, r.sample_id.index, r.reward, r.fate) for r in rows]

    fates = [(0, 0.0, "dropped"), (1, 9.0, "trained"), (2, 9.0, "trained"), (3, 1.1, "dropped")]
    expected = [(group, i, reward, fate) for group, reward, fate in fates for i in (0, 1)]
    assert run_ranks(2, work) == [expected, expected]


def test_groups_that_got_another_prompt() -> None:
    recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
    recorder.replaced(RoundId("train", 0, 0), [1])
    recorder.replaced(RoundId("eval", 0, 0), [4])
    recorder.replaced(RoundId("train", 1, 0), [0])  # drawn ahead
    for step, phase, groups, expected in (
        (0, "train", (0, 1), [False, True]),
        (0, "eval", (3, 4), [False, True]),
        (1, "train", (0, 1), [True, False]),
        (0, "train", (1,), [False]),  # forgotten once its round was recorded
    ):
        names = [sample_id(step, phase, group=group) for group in groups]
        rows = record(recorder, names, [[0.0, 0.0]] * len(names))
        assert [row.replaced for row in rows] == expected


def test_what_training_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    first = sample(sample_id(), response_token_ids=[5, 6, 7, 8], advantages=torch.tensor(0.5))
    # It has more tokens than the training saw, so positions are not known.
    turns = [[5, 6], [7]]
    second = sample(sample_id(index=1), response_token_ids=turns, advantages=torch.tensor(-1.5))
    third = sample(sample_id(index=2))

    def batch(rollout: Any, training: list[list[float]], mask: list[list[int]]) -> GRPOBatch:
        return GRPOBatch(
            completion_mask=torch.tensor(mask),
            truncated_mask=torch.zeros(len(mask)),
            seq_lengths=torch.zeros(len(mask)),
            rollout_per_token_logps=rollout and torch.tensor(rollout),
            old_per_token_logps=torch.tensor(training),
        )

    known = batch(
        [[9.0, -1.0, -2.0, -3.0, -4.0], [9.0, 9.0, 9.0, 9.0, -1.0]],
        [[0.0, -1.5, -1.0, -3.0625, -4.03125], [0.0, 0.0, 0.0, 0.0, -1.25]],
        [[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    )
    of_batches = [([first, second], known), ([third], batch(None, [[0.0]], [[1]]))]
    # Positions in the completion. A gap below `SHOWN_GAP` is left out.
    gaps = [(0, 0.5), (1, 1.0), (2, 0.0625)]
    for most in (64, 2):
        monkeypatch.setattr(rewards, "MOST_GAPS", most)
        of_first = {"gap_mean": 0.3984375, "gap_max": 1.0, "gaps": gaps[:most]}
        assert training_scores([first, second, third], of_batches) == {
            first.sample_id: {"advantage": 0.5, **of_first},
            second.sample_id: {"advantage": -1.5, "gap_mean": 0.25, "gap_max": 0.25},
            third.sample_id: {},
        }
