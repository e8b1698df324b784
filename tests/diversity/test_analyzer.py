"""From rounds to records and alarms, and the file of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.diversity.analyzer import AnalyzerSettings, RoundAnalyzer
from swift_grpo_ext.diversity.record import FILE_NAME, RecordFile, RoundRecord, read_records
from swift_grpo_ext.diversity.sample import Sample
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
        "broken randomness in train round 0.0: samples share noise (p = 1e-17). Remedy: ",
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
