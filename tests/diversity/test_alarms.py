"""The words of alarms, and which rounds make one alarm."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.diversity.alarms import (
    CHINESE,
    ENGLISH,
    alarm_line,
    alarm_streaks,
    describe_cause,
    describe_collision,
    remedy_of,
)
from swift_grpo_ext.diversity.record import RoundRecord


def record_of(verdict: str = "broken", step: int = 2, **values: Any) -> RoundRecord:
    metrics = {"copied_ratio": 0.994, "common_mode": 0.25}
    return RoundRecord(
        **{"phase": "train", "number": 0, "num_samples": 8, "num_groups": 2, "log10_p": -7.5,
           "shared_bits": 60.0, "num_pairs": 6, "num_earlier_pairs": 0, "num_untested": 0,
           "metrics": metrics, "verdict": verdict, "step": step, **values}
    )  # fmt: skip


def origin(
    index: int, seed: int | None = None, rank: int = 0, replica: str = "", **values: Any
) -> dict[str, Any]:
    sample_id = {"phase": "train", "step": 1, "number": 0, "group": 3, "index": index, "turn": 0}
    return {"sample_id": {**sample_id, **values}, "seed": seed, "rank": rank, "replica": replica}


def collision(*seeds: int | None, kind: str = "shared", **values: Any) -> dict[str, Any]:
    samples = [origin(index, seed) for index, seed in enumerate(seeds)]
    return {"kind": kind, "num_tokens": 40, "bits": 39.6, "log2_p": -30.0,
            "num_samples": len(samples), "samples": samples, "earlier": [], **values}  # fmt: skip


def test_a_line_says_cause_remedy_and_who() -> None:
    record = record_of(collisions=[collision(5, 5)] * 3, remedy="remedy_equal_seeds")
    who = (
        "group 3 sample 0 (rank 0), group 3 sample 1 (rank 0) share their first 40 tokens "
        "(40 bits of surprisal), all with seed 5."
    )
    assert alarm_line(record, 0) == (
        "diversity: broken randomness in train round 2.0: samples share noise (p = 3.2e-8). "
        "Remedy: please report it. No setting of yours is at fault: the seed rule never gives two "
        "samples one seed. "
        f"{who} {who} And 1 more."
    )
    record.collisions.pop()
    assert alarm_line(record, 0).endswith(f"one seed. {who} {who}")


def test_a_line_of_a_collapse_counts_its_rounds_and_names_nobody() -> None:
    record = record_of("collapse", collisions=[collision(5, 5)], remedy="remedy_collapse")
    assert alarm_line(record, 4) == (
        "diversity: collapsed policy in train round 2.0, 4 rounds in a row: 99% of the samples "
        "that could differ repeat another of their group, 25% of the prompts get one and the same "
        "completion, and the noise is sound (p = 3.2e-8). Remedy: if the reward is high, the "
        "prompts may be solved: use harder ones. Otherwise check what the reward favours, raise "
        "--temperature or --beta, or return to an earlier checkpoint."
    )


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ((5, 5), "all with seed 5"),
        ((5, 5 + 2**32), "with seeds whose low 32 bits are all 5"),
        ((5, 6), "although their seeds differ"),
        ((5, 5 + 2**31), "although their seeds differ"),
        ((None, None), "with seeds that the engine chose"),
        ((5, None), "with seeds that the engine chose"),
    ],
)
def test_seeds_are_described(seeds: tuple[int | None, ...], words: str) -> None:
    text = describe_collision(collision(*seeds), ENGLISH)
    assert text.endswith(f"(40 bits of surprisal), {words}.")


def test_samples_are_named_with_turn_rank_and_replica() -> None:
    samples = [origin(i, turn=i, rank=i, replica=f"server {i}") for i in range(5)]
    text = describe_collision(collision(samples=samples, num_samples=9), ENGLISH)
    assert text.startswith(
        "group 3 sample 0 (rank 0, replica 'server 0'), "
        "group 3 sample 1 turn 1 (rank 1, replica 'server 1'), "
        "group 3 sample 2 turn 2 (rank 2, replica 'server 2'), "
        "group 3 sample 3 turn 3 (rank 3, replica 'server 3') and 5 more share their first"
    )


def test_frozen_noise_names_the_latest_earlier_sample() -> None:
    earlier = [origin(7, step=0), origin(2, step=1, number=4, phase="eval")]
    found = collision(5, kind="frozen", earlier=earlier)
    assert describe_collision(found, ENGLISH) == (
        "group 3 sample 0 (rank 0): the first 40 tokens (40 bits of surprisal) are those of eval "
        "round 1.4, group 3 sample 2 (rank 0) (frozen noise)."
    )
    chinese = describe_collision(found, CHINESE)
    assert "冻结的噪声" in chinese
    assert "eval round 1.4" in chinese


def test_causes_are_told_in_both_languages() -> None:
    assert describe_cause(record_of(), CHINESE) == "样本共用了随机噪声（p = 3.2e-8）。"
    chinese = describe_cause(record_of("collapse"), CHINESE)
    assert all(figure in chinese for figure in ("99%", "25%", "3.2e-8"))


@pytest.mark.parametrize(
    ("record", "seed_mode", "remedy"),
    [
        (record_of("collapse"), "engine", "remedy_collapse"),
        (record_of(collisions=[collision(5, 5)]), "engine", "remedy_seed_mode"),
        (record_of(collisions=[collision(5, 6), collision(7, 7)]), "sample", "remedy_equal_seeds"),
        (record_of(collisions=[collision(5, 6)]), "sample", "remedy_ignored_seeds"),
        (record_of(collisions=[collision(5, kind="frozen")]), "sample", "remedy_ignored_seeds"),
        (record_of(), "sample", "remedy_ignored_seeds"),
    ],
)
def test_remedies(record: RoundRecord, seed_mode: str, remedy: str) -> None:
    assert remedy_of(record, seed_mode) == remedy


def test_a_streak_begins_with_the_rounds_that_patience_waited_for() -> None:
    verdicts = ["healthy", "collapse", "collapse", "healthy", "collapse", "broken", "broken"]
    alarming = {2, 5, 6}
    records = [
        record_of(verdict, step, alarm="words" if step in alarming else None)
        for step, verdict in enumerate(verdicts)
    ]
    evaluation = record_of("broken", 0, phase="eval", alarm="words")
    streaks = alarm_streaks([evaluation, *records])
    assert [[r.step for r in streak] for streak in streaks] == [[1, 2], [5, 6], [0]]
    assert streaks[-1][0].phase == "eval"
