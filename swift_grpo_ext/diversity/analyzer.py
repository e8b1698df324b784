"""Turns the samples of rounds into rows of the record, with verdicts and alarms, on rank 0. Pure.

The verdict on a round:

- `broken`: samples share prefixes that independent noise would not give them (`collision`).
- `collapse`: the test finds no shared noise, and yet the policy gives one completion: the same for
  nearly all prompts (`common_mode`), or one for each prompt (`copied_ratio`). Solved prompts look
  like the latter: a round with a share of `SOLVED` is healthy.
- `unknown`: the round looks collapsed, and the noise could not be tested.
- `healthy`: anything else, duplicates included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from swift_grpo_ext.diversity.alarms import alarm_line
from swift_grpo_ext.diversity.collision import (
    Collision,
    CollisionTest,
    PromptMemory,
    collision_test,
)
from swift_grpo_ext.diversity.metrics import (
    Group,
    Scores,
    group_samples,
    is_solved,
    outcome_metrics,
    round_metrics,
    token_bytes,
)
from swift_grpo_ext.record.tables import DiversityRow, SampleRow

# A round looks collapsed if its `common_mode` has this value and half of its samples are copies, or
# if its `copied_ratio` has this value and its prompts are not solved.
COMMON_MODE = 0.9
COPIED = 0.98
# With this share of solved groups, one completion for each prompt is success: a short answer has
# one right form. One completion for nearly all prompts never is.
SOLVED = 0.5
# An alarm needs this many collapsed rounds in a row: one round of easy prompts can look collapsed.
# Broken randomness is an alarm at once: its p-value holds for a single round.
PATIENCE = 3
MAX_WORST_GROUPS = 4
MAX_ORIGINS = 8  # samples of one collision that the record names
ALARM_P = 1e-6  # bounds the probability that a round of independent samples is called broken


class RoundAnalyzer:
    """Analyzes rounds in the order of the run. With `is_greedy`, equal completions are right.
    `seed_mode` (`--rollout_seed_mode`) selects the remedy that an alarm names."""

    def __init__(self, *, is_greedy: bool, seed_mode: str) -> None:
        self._is_greedy = is_greedy
        self._noise_remedy = "ignored_seeds" if seed_mode == "sample" else "seed_mode"
        self._memory = PromptMemory()
        self._num_collapsed = {"train": 0, "eval": 0}  # rounds in a row

    def analyze(
        self, samples: Sequence[SampleRow], scores: Scores | None = None
    ) -> list[DiversityRow]:
        """Return a row for each round of the samples, which may have any order."""
        groups = group_samples(samples)
        by_round = groupby(groups, key=lambda group: group[0].sample_id.round)
        return [self._analyze_round(list(found), scores or {}) for _, found in by_round]

    def _analyze_round(self, groups: Sequence[Group], scores: Scores) -> DiversityRow:
        samples = [sample for group in groups for sample in group]
        round_ = samples[0].sample_id.round
        test = CollisionTest(num_untested=len(samples))
        if not self._is_greedy:
            test = collision_test(samples, self._memory)
            self._memory.remember(samples)  # after the test: samples would collide with themselves
        metrics = {**round_metrics(groups), **outcome_metrics(groups, scores)}
        verdict = verdict_of(test, metrics)
        record = DiversityRow(
            round=round_,
            num_samples=len(samples),
            num_groups=len(groups),
            verdict=verdict,
            log10_p=test.log2_p * math.log10(2),
            shared_bits=test.max_bits,
            num_pairs=test.num_pairs,
            num_earlier_pairs=test.num_earlier_pairs,
            num_untested=test.num_untested,
            metrics=metrics,
            collisions=list(map(_describe, test.collisions)),
            worst_groups=worst_groups(groups, test.collisions, scores),
        )
        num_collapsed = self._num_collapsed[round_.phase] + 1 if verdict == "collapse" else 0
        self._num_collapsed[round_.phase] = num_collapsed
        if verdict == "broken" or num_collapsed >= PATIENCE:
            cause = self._noise_remedy if verdict == "broken" else "collapse"
            record.remedy = f"remedy_{cause}"
            record.alarm = alarm_line(record, num_collapsed)
        return record


def _describe(collision: Collision) -> dict[str, Any]:
    """Return an entry of `DiversityRow.collisions`."""

    def origin(row: SampleRow) -> dict[str, Any]:
        place = {"rank": row.rank, "replica": row.replica}
        return {"sample_id": asdict(row.sample_id), "seed": row.seed, **place}

    names = ("kind", "num_tokens", "bits", "log2_p")
    return {
        **{name: getattr(collision, name) for name in names},
        "samples": [origin(row) for row in collision.samples[:MAX_ORIGINS]],
        "earlier": [origin(row) for row in collision.earlier[-MAX_ORIGINS:]],
        # The samples beyond `MAX_ORIGINS` count, too.
        "num_samples": len(collision.samples),
    }


def verdict_of(test: CollisionTest, metrics: Mapping[str, float]) -> str:
    """Return the verdict on a round (see the module)."""
    if test.log2_p < math.log2(ALARM_P):
        return "broken"
    copied, common_mode = metrics["copied_ratio"], metrics["common_mode"]
    is_copied = copied >= COPIED and metrics.get("solved", 0.0) < SOLVED
    if is_copied or (copied >= 0.5 and common_mode >= COMMON_MODE):
        return "collapse" if test.num_pairs + test.num_earlier_pairs else "unknown"
    return "healthy"


def worst_groups(
    groups: Sequence[Group], collisions: Sequence[Collision], scores: Scores
) -> list[int]:
    """Return the numbers of the groups with collisions, then of those with most copies, solved ones
    last."""

    def place(group: Group) -> tuple[bool, float]:
        rewards = [scores.get(replace(sample.sample_id, turn=0), 0.0) for sample in group]
        return is_solved(rewards), len(set(map(token_bytes, group))) / len(group)

    worst = [sample.sample_id.group for c in collisions for sample in c.samples[:2]]
    worst += [
        group[0].sample_id.group for group in sorted(groups, key=place) if place(group)[1] < 1
    ]
    return list(dict.fromkeys(worst))[:MAX_WORST_GROUPS]
