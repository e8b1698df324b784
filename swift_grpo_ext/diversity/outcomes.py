"""Diversity that decides: how much the samples of a round differ where they are right. Pure.

A sample is *correct* if its reward is `--diversity_correct_reward` or more. All turns of a
conversation are one sample; the last turn's text and tokens stand for it. Samples without a score
are left out, and a metric without any group is missing. Means are over groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from swift_grpo_ext.diversity.metrics import (
    compared_tokens,
    distinct_answers,
    mean,
    ngram_counts,
    vendi_score,
)
from swift_grpo_ext.diversity.sample import Group, Sample
from swift_grpo_ext.sampling.seeding import SampleId

Scores = Mapping[SampleId, float]
"""Rewards by sample, of turn 0."""


def outcome_metrics(
    groups: Sequence[Group], scores: Scores, correct_reward: float
) -> dict[str, float]:
    """All metrics of a round, by name; undefined ones are left out.

    Args:
        groups: of one round, over all ranks.
        scores: of the samples that have one.
        correct_reward: the least reward of a correct sample.
    """
    scored = _scored_groups(groups, scores)
    rewards = [[scores[_name(sample)] for sample in group] for group in scored]
    counts = [(len(r), sum(reward >= correct_reward for reward in r)) for r in rewards]
    pairs = [zip(group, r, strict=True) for group, r in zip(scored, rewards, strict=True)]
    correct = [[sample for sample, reward in pair if reward >= correct_reward] for pair in pairs]
    correct = [group for group in correct if group]
    found = {
        "equal_rewards": mean(float(min(r) == max(r)) for r in rewards if len(r) > 1),
        "correct_answers": mean(map(distinct_answers, correct)),
        "correct_vendi": correct_vendi(correct),
    }
    largest = max((n for n, _ in counts), default=0)
    for k in (2**power for power in range(largest.bit_length())):
        found[f"pass_at_{k}"] = mean(pass_at_k(n, c, k) for n, c in counts if n >= k)
    return {name: value for name, value in found.items() if value is not None}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k), if c of n are.

    Unbiased for n independent samples, n >= k. Source: Chen et al. 2021 (Evaluating Large Language
    Models Trained on Code), equation 1, as the product that they compute.
    """
    return float(1 - np.prod(1 - k / np.arange(n - c + 1, n + 1))) if n - c >= k else 1.0


def correct_vendi(correct: Sequence[Group]) -> float | None:
    """Effective number of different samples among the correct ones of a group (`vendi_score`).

    1 (one way to be right) to G: higher is more diverse; groups without a correct sample do not
    count. Within the bounds of `metrics`. Source: Friedman and Dieng 2023, on a subset.
    """
    if not correct:
        return None
    tokens = compared_tokens(correct)
    return mean(1.0 if len(t) == 1 else vendi_score([*ngram_counts(t)]) for t in tokens)


def _scored_groups(groups: Sequence[Group], scores: Scores) -> list[list[Sample]]:
    """Samples that have a score, by group; of each the last turn."""
    last: dict[SampleId, Sample] = {}
    for sample in (sample for group in groups for sample in group):
        if _name(sample) in scores:
            turn = last.get(_name(sample), sample).origin.sample_id.turn
            if sample.origin.sample_id.turn >= turn:
                last[_name(sample)] = sample
    in_order = (last[name] for name in sorted(last))
    by_group = groupby(in_order, key=lambda sample: sample.origin.sample_id.group)
    return [list(group) for _, group in by_group]


def _name(sample: Sample) -> SampleId:
    return replace(sample.origin.sample_id, turn=0)
