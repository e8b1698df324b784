"""The analyzer turns rounds into rows of the record, verdicts and alarms with their remedies (D2,
D3, R4)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from swift_grpo_ext.diversity.alarms import alarm_line
from swift_grpo_ext.diversity.analyzer import RoundAnalyzer, verdict_of
from swift_grpo_ext.diversity.collision import CollisionTest
from swift_grpo_ext.diversity.metrics import group_samples, round_metrics
from swift_grpo_ext.record.tables import SampleRow
from tests.rig.diversity.samples import LONG, group_of, groups_of, sample


def analyzer_of(**changes: Any) -> RoundAnalyzer:
    settings = {"is_greedy": False, "seed_mode": "sample", **changes}
    return RoundAnalyzer(**settings)


def copies(step: int, **kwargs: Any) -> list[SampleRow]:
    """Return a collapsed round: equal samples of low surprisal."""
    return group_of(*[[1, 2, step]] * 4, step=step, bits=0.05, **kwargs)


def different(step: int, **kwargs: Any) -> list[SampleRow]:
    return group_of(*[[step * 10 + i] * 5 for i in range(4)], step=step, **kwargs)


def test_a_record_holds_what_was_measured() -> None:
    samples = [
        *(sample(LONG, index=i, step=3, group=4, seed=i, rank=i, replica="r") for i in range(10)),
        *(sample([i], index=i, step=3, group=7, prompt="b") for i in (0, 1)),
        *(sample([5], index=i, step=3, group=8, prompt="c", bits=None) for i in (0, 1)),
        sample([1], step=3, group=9, prompt="d"),
    ]
    healthy, record = analyzer_of().analyze([*samples, *different(1, prompt="e")])
    assert (healthy.round.step, healthy.num_samples, healthy.num_pairs) == (1, 4, 6)
    assert (healthy.verdict, healthy.alarm, healthy.remedy) == ("healthy", None, "")
    assert record.round == ("train", 3, 0)
    assert (record.num_samples, record.num_groups) == (15, 4)
    assert (record.num_pairs, record.num_earlier_pairs, record.num_untested) == (46, 0, 2)
    assert record.shared_bits == pytest.approx(60, rel=1e-5)
    assert record.metrics == round_metrics(group_samples(samples))
    assert record.worst_groups == [4, 8]
    (collision,) = record.collisions
    assert [len(collision[name]) for name in ("samples", "earlier")] == [8, 0]
    assert collision["samples"][1] == {
        "sample_id": {"phase": "train", "step": 3, "number": 0, "group": 4, "index": 1, "turn": 0},
        **{"seed": 1, "rank": 1, "replica": "r"},
    }
    assert (collision["kind"], collision["num_tokens"]) == ("shared", 60)
    assert collision["num_samples"] == 10
    assert collision["bits"] == pytest.approx(60, rel=1e-5)
    assert collision["log2_p"] * math.log10(2) == pytest.approx(record.log10_p)
    assert record.log10_p < -100
    assert record.remedy == "remedy_ignored_seeds"


def test_the_groups_with_most_copies_are_the_worst() -> None:
    ids = [[[1], [1], [2]], [[1], [1], [1]], [[1], [2], [3]], [[1]]]
    for more, worst in (([], [1, 0]), ([[[1], [1]]] * 3, [1, 4, 5, 6])):
        groups = groups_of(*ids, *more, bits=0.1)
        (record,) = analyzer_of().analyze([s for group in groups for s in group])
        assert record.worst_groups == worst


# --- verdicts ---


BROKEN = math.log2(1e-6) - 1e-9


@pytest.mark.parametrize(
    ("log2_p", "copied", "common_mode", "solved", "verdict"),
    [
        (BROKEN, 1.0, 1.0, 0.0, "broken"),
        (math.log2(1e-6), 0.0, 0.0, 0.0, "healthy"),  # not below
        (0.0, 0.98, 0.0, 0.0, "collapse"),
        (0.0, 0.979, 0.89, 0.0, "healthy"),
        (0.0, 0.5, 0.9, 0.0, "collapse"),
        (0.0, 0.49, 1.0, 0.0, "healthy"),
        # One completion for each prompt may solve it; one for nearly all prompts is a collapse.
        (0.0, 1.0, 0.25, 0.49, "collapse"),
        (0.0, 1.0, 0.25, 0.5, "healthy"),
        (0.0, 1.0, 0.9, 1.0, "collapse"),
    ],
)
def test_verdicts(
    log2_p: float, copied: float, common_mode: float, solved: float, verdict: str
) -> None:
    metrics = {"copied_ratio": copied, "common_mode": common_mode}
    metrics |= {"solved": solved} if solved else {}
    for tested in ({"num_pairs": 1}, {"num_earlier_pairs": 1}):
        assert verdict_of(CollisionTest(log2_p=log2_p, **tested), metrics) == verdict
    untested = "unknown" if verdict == "collapse" else verdict
    assert verdict_of(CollisionTest(log2_p=log2_p), metrics) == untested


def test_a_solved_prompt_is_no_alarm_and_the_last_of_the_worst() -> None:
    analyzer = analyzer_of()
    for step in range(4):
        groups = groups_of([LONG] * 4, [[*LONG, 1]] * 4, step=step, bits=0.001)
        samples = [sample for group in groups for sample in group]
        scores = {s.sample_id: 1.0 if step == 3 else 1.0 - s.sample_id.group for s in samples}
        [record] = analyzer.analyze(samples, scores)
        assert (record.metrics["solved"], record.alarm) == (1.0 if step == 3 else 0.5, None)
        assert record.worst_groups == ([0, 1] if step == 3 else [1, 0])


def test_greedy_copies_are_no_alarm_and_not_remembered() -> None:
    analyzer = analyzer_of(is_greedy=True)
    for step in range(3):
        (record,) = analyzer.analyze(group_of(*[LONG] * 4, step=step))
        assert (record.verdict, record.alarm, record.num_untested) == ("unknown", None, 4)
        assert (record.num_pairs, record.num_earlier_pairs) == (0, 0)


def test_collapse_is_an_alarm_in_its_third_round_for_each_phase() -> None:
    analyzer = analyzer_of()
    rounds = [
        *(copies(0), copies(1), copies(0, phase="eval"), copies(1, phase="eval"), copies(2)),
        *(copies(3), different(4), copies(5), copies(6), copies(7)),
    ]
    records = [analyzer.analyze(samples)[0] for samples in rounds]
    alarms = [bool(record.alarm) for record in records]
    assert [record.scalars()["diversity/collapse"] for record in records] == alarms
    assert alarms == [False] * 4 + [True] * 2 + [False] * 3 + [True]
    assert "collapsed policy in train round 3.0, 4 rounds in a row: 100%" in str(records[5].alarm)


# --- alarms ---


@pytest.mark.parametrize(
    ("seeds", "mode", "remedy"),
    [((5, 6), "sample", "ignored_seeds"), ((None,) * 2, "engine", "seed_mode")],
)
def test_an_alarm_names_who_shares_what(
    seeds: tuple[int | None, ...], mode: str, remedy: str
) -> None:
    samples = [
        sample(LONG, index=i, turn=1, rank=i, replica=f"server {i}", seed=seed, group=3)
        for i, seed in enumerate(seeds)
    ]
    (record,) = analyzer_of(seed_mode=mode).analyze(samples)
    assert record.remedy == f"remedy_{remedy}"
    begins, ends = str(record.alarm).split(" Remedy: ")
    assert begins == (
        "diversity: broken randomness in train round 0.0: samples share noise (p = 1.7e-18)."
    )
    first, second = ("", "") if mode == "engine" else (", seed 5", ", seed 6")
    assert ends.endswith(
        f". group 3 sample 0 turn 1 (rank 0, replica 'server 0'{first}), group 3 sample 1 turn 1 "
        f"(rank 1, replica 'server 1'{second}) share their first 60 tokens (60 bits of surprisal)."
    )


def test_a_long_alarm_names_some_and_the_earlier_round_of_frozen_noise() -> None:
    """It names one of three collisions, and four of five samples. A collapse has its figures."""
    analyzer, groups = analyzer_of(), groups_of(*[[LONG] * 5] * 3, replica="")
    (record,) = analyzer.analyze([s for group in groups for s in group])
    assert "sample 3 (rank 0) and 1 more share their first 60" in str(record.alarm)
    assert str(record.alarm).endswith(" (60 bits of surprisal). And 2 more.")
    (frozen,) = analyzer.analyze(group_of(LONG, step=5, prompt="2"))
    assert (frozen.verdict, frozen.remedy) == ("broken", "remedy_ignored_seeds")
    assert "are those of train round 0.0, group 2 sample" in str(frozen.alarm)
    record = replace(record, verdict="collapse", log10_p=-7.5, remedy="remedy_collapse")
    record.metrics |= {"copied_ratio": 0.994, "common_mode": 0.25}
    line = alarm_line(record, 4)
    assert line.startswith("diversity: collapsed policy in train round 0.0, 4 rounds in a row: 99%")
    assert "25% of the prompts" in line
    assert "(p = 3.2e-8). Remedy: if the reward is high" in line
