"""From rounds to records and alarms, and the file of records."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.diversity.analyzer import AnalyzerSettings, RoundAnalyzer, judge
from swift_grpo_ext.diversity.collision import CollisionTest, collision_test
from swift_grpo_ext.diversity.metrics import round_metrics
from swift_grpo_ext.diversity.record import FILE_NAME, RecordFile, RoundRecord, read_records
from swift_grpo_ext.diversity.sample import Sample, group_samples
from tests.diversity.samples import group_of, sample

LONG = list(range(60))
SETTINGS = AnalyzerSettings(alarm_p=1e-6, patience=2, is_greedy=False, seed_mode="sample")


def analyzer_of(**changes: Any) -> RoundAnalyzer:
    return RoundAnalyzer(AnalyzerSettings(**{**vars(SETTINGS), **changes}))


def copies(step: int, **kwargs: Any) -> list[Sample]:
    """A collapsed round: no surprise in it."""
    return group_of(*[[1, 2, step]] * 4, step=step, bits=0.05, **kwargs)


def own(step: int) -> list[Sample]:
    return group_of(*[[step * 10 + i] * 5 for i in range(4)], step=step)


def test_a_healthy_round_is_recorded_without_alarm() -> None:
    (record,) = analyzer_of().analyze(own(0))
    assert (record.verdict, record.alarm) == ("healthy", None)
    assert (record.num_samples, record.num_groups, record.num_pairs) == (4, 1, 6)
    assert record.scalars()["diversity/unique_ratio"] == 1.0
    assert record.scalars()["diversity/log10_p"] == 0.0


def test_two_replicas_with_one_seed_are_named_in_the_first_round() -> None:
    samples = [
        sample(LONG, index=0, rank=0, replica="server 0 replica 0", seed=77, group=3),
        sample(LONG, index=1, rank=1, replica="server 0 replica 1", seed=77, group=3),
        sample([1], index=2, group=3),
    ]
    (record,) = analyzer_of().analyze(samples)
    assert record.verdict == "broken"
    assert record.alarm is not None
    assert "\n" not in record.alarm
    for words in (
        "broken randomness in train round 0.0: samples share noise (p = 1.0e-17). Remedy: ",
        "group 3 sample 0 (rank 0, replica 'server 0 replica 0')",
        "group 3 sample 1 (rank 1, replica 'server 0 replica 1')",
        "share their first 60 tokens (60 bits of surprisal), all with seed 77",
    ):
        assert words in record.alarm


@pytest.mark.parametrize(
    ("seeds", "mode", "words"),
    [
        ((None, None), "engine", "Remedy: set --rollout_seed_mode sample"),
        ((5, 5 + 2**32), "sample", "low 32 bits are all 5"),
        ((5, 6), "sample", "although their seeds differ"),
        ((5, 6), "sample", "did not heed the seeds"),
        ((5, 5), "sample", "please report it"),
        ((None, 6), "engine", "seeds that the engine chose"),
    ],
)
def test_alarms_say_what_is_shared(seeds: tuple[Any, Any], mode: str, words: str) -> None:
    samples = [sample(LONG, index=i, seed=seed) for i, seed in enumerate(seeds)]
    (record,) = analyzer_of(seed_mode=mode).analyze(samples)
    assert words in (record.alarm or "")


def test_frozen_noise_is_named_with_the_earlier_round() -> None:
    analyzer = analyzer_of(seed_mode="engine")
    ids = [[i * 100 + k for k in range(40)] for i in range(4)]
    assert analyzer.analyze(group_of(*ids, step=4))[0].verdict == "healthy"
    (record,) = analyzer.analyze(group_of(*ids, step=5))
    assert record.verdict == "broken"
    assert "the first 40 tokens (40 bits of surprisal) are those of train round 4.0, group 0" in (
        record.alarm or ""
    )


def test_collapse_is_an_alarm_once_patience_is_over() -> None:
    analyzer = analyzer_of(patience=2)
    found = [analyzer.analyze(copies(step))[0] for step in range(3)]
    assert [r.verdict for r in found] == ["collapse"] * 3
    assert [bool(r.alarm) for r in found] == [False, True, True]
    assert "collapsed policy in train round 2.0, 3 rounds in a row: 100%" in (found[2].alarm or "")
    assert analyzer.analyze(own(3))[0].alarm is None
    assert analyzer.analyze(copies(4))[0].alarm is None


def test_collapse_of_evaluations_is_counted_apart() -> None:
    analyzer = analyzer_of(patience=2)
    assert analyzer.analyze(copies(0))[0].alarm is None
    assert analyzer.analyze(copies(0, phase="eval"))[0].alarm is None
    assert analyzer.analyze(copies(1))[0].alarm is not None


def test_a_patience_of_one_round() -> None:
    (record,) = analyzer_of(patience=1).analyze(copies(0))
    assert "1 rounds in a row" in (record.alarm or "")


def test_no_patience_no_alarm_of_collapse() -> None:
    analyzer = analyzer_of(patience=0)
    assert [analyzer.analyze(copies(step))[0].alarm for step in range(5)] == [None] * 5


def test_greedy_copies_are_no_alarm() -> None:
    (record,) = analyzer_of(is_greedy=True).analyze(group_of(*[LONG] * 4))
    assert (record.verdict, record.alarm, record.num_pairs) == ("unknown", None, 0)
    assert record.num_untested == 4


def test_rounds_that_come_together_are_told_apart() -> None:
    records = analyzer_of().analyze([*own(1), *own(0)])
    assert [(r.step, r.num_samples) for r in records] == [(0, 4), (1, 4)]


# --- verdicts ---


def test_verdicts() -> None:
    short = [[1, 2], [1, 2], [1, 2], [1, 2]]
    cases = {
        "broken": group_of(*[list(range(60))] * 4),
        "collapse": group_of(*short, bits=0.1),
        "healthy": group_of([1, 2], [1, 2], [1, 3], [4], bits=0.5),
        "unknown": group_of(*short, bits=None),
    }
    for kind, group in cases.items():
        assert judge(collision_test(group), round_metrics([group]), 1e-6) == kind
    one_answer = [group_of([7], [7], [7], [g], group=g, fingerprint=f"{g}") for g in range(10)]
    right_answers = [group_of([g], [g], [g], [7], group=g, fingerprint=f"{g}") for g in range(10)]
    for kind, groups in {"collapse": one_answer, "healthy": right_answers}.items():
        test = collision_test([s for group in groups for s in group])
        assert judge(test, round_metrics(groups), 1e-6) == kind
    single = [sample([1])]
    assert judge(collision_test(single), round_metrics([single]), 1e-6) == "healthy"


@pytest.mark.parametrize(
    ("log2_p", "verdict"),
    [
        (math.log2(1e-6) - 1e-9, "broken"),
        (math.log2(1e-6), "healthy"),  # not below
        (math.log2(2e-6), "healthy"),
        (math.log(1e-6) - 0.1, "healthy"),  # p is 6e-5: nats are no bits
        (-6.0, "healthy"),
    ],
)
def test_alarm_p_is_a_probability_per_round(log2_p: float, verdict: str) -> None:
    metrics = {"copied_ratio": 0.0, "common_mode": 0.0}
    assert judge(CollisionTest(log2_p=log2_p), metrics, 1e-6) == verdict


@pytest.mark.parametrize(
    ("copied", "common_mode", "verdict"),
    [
        (0.98, 0.0, "collapse"),
        (0.979, 0.0, "healthy"),
        (0.979, 0.89, "healthy"),
        (0.5, 0.9, "collapse"),
        (0.49, 1.0, "healthy"),
        (0.5, 0.89, "healthy"),
    ],
)
def test_thresholds_of_a_collapse(copied: float, common_mode: float, verdict: str) -> None:
    metrics = {"copied_ratio": copied, "common_mode": common_mode}
    assert judge(CollisionTest(num_pairs=1), metrics, 1e-6) == verdict
    assert judge(CollisionTest(num_earlier_pairs=1), metrics, 1e-6) == verdict
    untested = "unknown" if verdict == "collapse" else verdict
    assert judge(CollisionTest(), metrics, 1e-6) == untested


def test_the_flag_decides_where_an_alarm_begins() -> None:
    """One pair of 20 bits: p = 2^-20, twice for the two halves of the level: 1.91e-6."""
    pair = group_of(*[LONG[:20]] * 2)
    for alarm_p, verdict in ((1.90e-6, "healthy"), (1.92e-6, "broken")):
        (record,) = analyzer_of(alarm_p=alarm_p).analyze(pair)
        assert record.log10_p == pytest.approx(math.log10(2 * 2**-20), abs=1e-5)
        assert record.verdict == ("collapse" if verdict == "healthy" else verdict)


def test_a_record_holds_what_was_found() -> None:
    samples = [
        *(sample(LONG, index=i, step=3, group=4, seed=i, rank=i, replica="r") for i in range(10)),
        *(sample([i], index=i, step=3, group=7, fingerprint="b") for i in (0, 1)),
        *(sample([5], index=i, step=3, group=8, fingerprint="c", bits=None) for i in (0, 1)),
        sample([1], step=3, group=9, fingerprint="d"),
    ]
    (record,) = analyzer_of().analyze(samples)
    assert (record.phase, record.step, record.number) == ("train", 3, 0)
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
    assert (collision["kind"], collision["num_tokens"], collision["num_samples"]) == (
        *("shared", 60),
        10,
    )
    assert collision["bits"] == pytest.approx(60, rel=1e-5)
    assert collision["log2_p"] * math.log10(2) == pytest.approx(record.log10_p)
    assert record.log10_p < -100
    assert 0 < record.seconds < 10
    assert abs(record.time - time.time()) < 60
    assert record.remedy == "remedy_ignored_seeds"


def test_the_groups_with_most_copies_are_the_worst() -> None:
    ids = ([[1], [1], [2]], [[1], [1], [1]], [[1], [2], [3]], [[1]])
    groups = [group_of(*g, group=i, fingerprint=f"{i}", bits=0.1) for i, g in enumerate(ids)]
    more = [group_of([1], [1], group=i, fingerprint=f"{i}", bits=0.1) for i in (4, 5, 6)]
    (record,) = analyzer_of().analyze([s for group in groups for s in group])
    assert record.worst_groups == [1, 0]
    (record,) = analyzer_of().analyze([s for group in groups + more for s in group])
    assert record.worst_groups == [1, 4, 5, 6]


def test_greedy_rounds_are_not_remembered_either() -> None:
    analyzer = analyzer_of(is_greedy=True)
    found = [analyzer.analyze(group_of(LONG, step=step))[0] for step in range(3)]
    assert [(r.verdict, r.num_earlier_pairs) for r in found] == [("healthy", 0)] * 3


# --- the file ---


def record_of(step: int, phase: Any = "train") -> RoundRecord:
    (record,) = analyzer_of().analyze([sample([step], step=step, phase=phase)])
    return record


def test_records_come_back(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, start_step=0)
    (record,) = analyzer_of().analyze(group_of(*[LONG] * 2, text="数字"))
    file.append(record)
    assert read_records(tmp_path) == [record]


def test_a_resumed_session_replaces_what_it_draws_again(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, start_step=0)
    for step in range(4):
        file.append(record_of(step))
        file.append(record_of(step, "eval"))
    resumed = RecordFile(tmp_path, start_step=2)
    resumed.append(record_of(2))
    names = [r.round_name for r in read_records(tmp_path)]
    assert names == [
        *("eval round 0.0", "train round 0.0", "eval round 1.0", "train round 1.0"),
        *("eval round 2.0", "train round 2.0"),
    ]
    RecordFile(tmp_path, start_step=0)
    assert read_records(tmp_path) == []


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    RecordFile(tmp_path, start_step=0).append(record_of(0))
    with (tmp_path / FILE_NAME).open("a") as f:
        f.write('{"phase": "train", "st')
    assert len(read_records(tmp_path)) == 1
    assert read_records(tmp_path / "none") == []


def test_lines_are_plain_json(tmp_path: Path) -> None:
    RecordFile(tmp_path, start_step=3).append(record_of(3))
    first, second = (tmp_path / FILE_NAME).read_text().splitlines()
    assert json.loads(first) == {"start_step": 3}
    assert json.loads(second)["verdict"] == "healthy"
