"""Diversity among correct samples, against values by hand and by brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from swift_grpo_ext.diversity.outcomes import outcome_metrics, pass_at_k
from swift_grpo_ext.diversity.sample import Sample
from tests.diversity.samples import group_of, sample


def scores_of(samples: list[Sample], rewards: list[float]) -> dict:  # type: ignore[type-arg]
    return {s.origin.sample_id: r for s, r in zip(samples, rewards, strict=True)}


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one() -> None:
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([1] * c + [0] * (n - c), k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_all_metrics_of_a_round() -> None:
    """Three groups of four: two ways to be right, none right, all right in one way."""
    texts = ["<answer>7</answer>", "<answer>seven</answer>", "<answer>8</answer>", "?"]
    first = [sample([i] * 8, group=0, index=i, text=texts[i]) for i in range(4)]
    second = group_of([1], [2], [3], [4], group=1)
    third = group_of(*[[5, 6, 7]] * 4, group=2, text="7")
    samples = [*first, *second, *third]
    rewards = [1.0, 1.5, 0.5, 0.0, *[0.25] * 4, *[1.0] * 4]
    found = outcome_metrics([first, second, third], scores_of(samples, rewards), 1.0)
    assert found == pytest.approx(
        {
            "equal_rewards": 2 / 3,
            "correct_answers": 1.5,  # 2 and 1
            "correct_vendi": 1.5,
            "pass_at_1": 0.5,
            "pass_at_2": (5 / 6 + 0 + 1) / 3,
            "pass_at_4": 2 / 3,
        }
    )


def test_the_threshold_counts_as_correct() -> None:
    group = group_of([1], [2])
    scores = scores_of(group, [0.5, 0.499])
    assert outcome_metrics([group], scores, 0.5)["pass_at_1"] == 0.5
    assert outcome_metrics([group], scores, 0.4999)["pass_at_1"] == 0.5
    assert outcome_metrics([group], scores, 0.501)["pass_at_1"] == 0.0


def test_groups_without_a_correct_sample_have_no_diversity_of_them() -> None:
    group = group_of([1], [2])
    found = outcome_metrics([group], scores_of(group, [0.0, 0.0]), 1.0)
    assert found == {"equal_rewards": 1.0, "pass_at_1": 0.0, "pass_at_2": 0.0}


def test_samples_without_a_score_are_left_out() -> None:
    group = group_of([1], [2], [3])
    assert outcome_metrics([group], {}, 1.0) == {}
    found = outcome_metrics([group], scores_of(group[:1], [1.0]), 1.0)
    assert found == {"correct_answers": 1.0, "correct_vendi": 1.0, "pass_at_1": 1.0}


def test_the_last_turn_stands_for_a_conversation() -> None:
    def turn(drawn: Sample, number: int, text: str) -> Sample:
        name = replace(drawn.origin.sample_id, turn=number)
        return replace(drawn, origin=replace(drawn.origin, sample_id=name), text=text)

    first = group_of([1], [2])
    groups = [
        [turn(s, 0, "same") for s in first],
        [turn(s, 1, f"<answer>{s.origin.sample_id.index}</answer>") for s in first],
    ]
    for order in (groups, groups[::-1]):
        found = outcome_metrics(order, scores_of(first, [1.0, 1.0]), 1.0)
        assert found["correct_answers"] == 2.0
        assert found["pass_at_1"] == 1.0
