"""From the samples of rounds to records and alarms, on rank 0. Pure.

The verdict on a round:

- `broken`: samples share prefixes that independent noise would not give them (`collision`). This
  says nothing about the policy.
- `collapse`: the noise is sound as far as the test can see, and yet the policy gives one
  completion: the same to nearly all prompts (`common_mode`), or to each prompt its own without
  exception (`copied_ratio`). Its groups then have no advantage to learn from. Short correct answers
  come close to the second; where the reward is high, it is success.
- `unknown`: the round looks collapsed, and the noise could not be tested.
- `healthy`: anything else, duplicates included.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from swift_grpo_ext.diversity.alarms import alarm_line, remedy_of
from swift_grpo_ext.diversity.collision import (
    Collision,
    CollisionTest,
    PromptMemory,
    collision_test,
)
from swift_grpo_ext.diversity.metrics import round_metrics
from swift_grpo_ext.diversity.outcomes import Scores, outcome_metrics
from swift_grpo_ext.diversity.record import RoundRecord
from swift_grpo_ext.diversity.sample import Group, Sample, group_samples

COMMON_MODE = 0.9
"""`common_mode` from which on a round looks collapsed, if half of the samples are copies too."""

COPIED = 0.98
"""`copied_ratio` from which on a round looks collapsed in any case."""

MAX_WORST_GROUPS = 4
MAX_ORIGINS = 8
"""Kept in the record of one collision."""


@dataclass(frozen=True, kw_only=True)
class AnalyzerSettings:
    """The values of the flags."""

    alarm_p: float
    patience: int
    """Collapsed rounds in a row that make an alarm; 0: none. Broken randomness is an alarm at once:
    its p-value says already how odd one round is."""

    is_greedy: bool
    """Greedy decoding: equal completions are right, and nothing is tested."""

    seed_mode: str
    correct_reward: float = 1.0


class RoundAnalyzer:
    """Analyzes rounds in the order of the run."""

    def __init__(self, settings: AnalyzerSettings) -> None:
        self._settings = settings
        self._memory = PromptMemory()
        self._num_collapsed: dict[str, int] = {}
        """Collapsed rounds in a row, by phase."""

    def analyze(self, samples: Sequence[Sample], scores: Scores | None = None) -> list[RoundRecord]:
        """One record for each round that the samples of all ranks belong to.

        Args:
            scores: rewards of the samples that were scored, for `outcomes`.
        """
        groups = group_samples(samples)
        by_round = groupby(groups, key=lambda group: group[0].origin.sample_id.round)
        return [self._analyze_round(list(of_round), scores or {}) for _, of_round in by_round]

    def _analyze_round(self, groups: Sequence[Group], scores: Scores) -> RoundRecord:
        start = time.perf_counter()
        samples = [sample for group in groups for sample in group]
        test = CollisionTest(num_untested=len(samples))
        if not self._settings.is_greedy:
            test = collision_test(samples, self._memory)
            self._memory.remember(samples)
        metrics = round_metrics(groups)
        metrics |= outcome_metrics(groups, scores, self._settings.correct_reward)
        record = make_record(groups, test, metrics, judge(test, metrics, self._settings.alarm_p))
        before = self._num_collapsed.get(record.phase, 0)
        collapsed = before + 1 if record.verdict == "collapse" else 0
        self._num_collapsed[record.phase] = collapsed
        if record.verdict == "broken" or collapsed >= self._settings.patience > 0:
            record.remedy = remedy_of(record, self._settings.seed_mode)
            record.alarm = alarm_line(record, collapsed)
        record.seconds = time.perf_counter() - start
        record.time = time.time()
        return record


def judge(test: CollisionTest, metrics: Mapping[str, float], alarm_p: float) -> str:
    """The verdict on a round.

    Args:
        test: of the round; an empty one for greedy decoding.
        metrics: of the round, `copied_ratio` and `common_mode` among them.
        alarm_p: the bound on the probability that a round of independent samples is called broken.
    """
    if test.log2_p < math.log2(alarm_p):
        return "broken"
    copied, common_mode = metrics["copied_ratio"], metrics["common_mode"]
    if copied >= COPIED or (copied >= 0.5 and common_mode >= COMMON_MODE):
        return "collapse" if test.is_tested else "unknown"
    return "healthy"


def make_record(
    groups: Sequence[Group], test: CollisionTest, metrics: Mapping[str, float], verdict: str
) -> RoundRecord:
    """The record of a round that has samples, without alarm."""
    sample_id = groups[0][0].origin.sample_id
    return RoundRecord(
        phase=sample_id.phase,
        step=sample_id.step,
        number=sample_id.number,
        num_samples=sum(map(len, groups)),
        num_groups=len(groups),
        verdict=verdict,
        log10_p=test.log2_p * math.log10(2),
        shared_bits=test.max_bits,
        num_pairs=test.num_pairs,
        num_earlier_pairs=test.num_earlier_pairs,
        num_untested=test.num_untested,
        metrics=dict(metrics),
        collisions=[_shorten(collision) for collision in test.collisions],
        worst_groups=_worst_groups(groups, test.collisions),
    )


def _shorten(collision: Collision) -> dict[str, Any]:
    samples, earlier = collision.samples[:MAX_ORIGINS], collision.earlier[-MAX_ORIGINS:]
    shortened = replace(collision, samples=samples, earlier=earlier)
    # Through JSON, so that a record is what the file gives back (lists, not tuples).
    plain: dict[str, Any] = json.loads(json.dumps(asdict(shortened)))
    return {**plain, "num_samples": len(collision.samples)}


def _worst_groups(groups: Sequence[Group], collisions: Sequence[Collision]) -> list[int]:
    worst = [origin.sample_id.group for c in collisions for origin in c.samples[:2]]
    share_distinct = {
        group[0].origin.sample_id.group: len({s.token_ids.tobytes() for s in group}) / len(group)
        for group in groups
    }
    copied = [number for number, share in share_distinct.items() if share < 1]
    worst += sorted(copied, key=share_distinct.__getitem__)
    return list(dict.fromkeys(worst))[:MAX_WORST_GROUPS]
