"""What the page says of a run's diversity: verdict, alarms, worst groups."""

from __future__ import annotations

import shutil
from pathlib import Path

from swift_grpo_ext.tools.view.diversity import (
    alarm_spans,
    list_alarms,
    overall_verdict,
    worst_groups,
)
from swift_grpo_ext.tools.view.group import RunView
from tests.diversity.runs import frozen_rounds, make_run
from tests.diversity.samples import group_of


def collapsed(step: int) -> list:  # type: ignore[type-arg]
    """A round whose four samples are equal, at a surprisal that makes it likely."""
    return group_of(*[[1, step]] * 4, step=step, bits=0.01)


def test_verdict_of_a_run(tmp_path: Path) -> None:
    records = make_run(tmp_path, [collapsed(step) for step in range(3)])
    assert overall_verdict(records) == "collapse"
    assert overall_verdict(records[:1]) == "healthy"  # one odd round is no alarm
    assert overall_verdict([]) == "none"


def test_alarms_in_a_row_are_one(tmp_path: Path) -> None:
    """Rounds that patience waited for belong to their collapse; spans are in steps done."""
    rounds = [collapsed(step) for step in range(5)]
    rounds[3] = group_of([1], [2], [3], [4], step=3)
    rounds += [group_of(*[list(range(60))] * 2, step=step) for step in (5, 6)]
    records = make_run(tmp_path, rounds)
    assert alarm_spans(records) == [
        {"first": 1, "last": 3, "kind": "collapse"},
        {"first": 6, "last": 7, "kind": "broken"},
    ]
    collapse, broken = list_alarms(records)
    assert (collapse["first"], collapse["last"]) == ("train round 0.0", "2.0")
    assert (collapse["num_rounds"], collapse["collisions"]) == (3, [])
    assert "repeat another of their group" in collapse["cause"][0]
    assert "样本共用了随机噪声" in broken["cause"][1]
    assert broken["remedy"] == "remedy_seed_mode"
    assert "the first 60 tokens" in broken["collisions"][0][0]
    assert overall_verdict(records) == "broken"


def test_frozen_noise_stands_beside_what_it_repeats(tmp_path: Path) -> None:
    records = make_run(tmp_path, frozen_rounds())
    run = RunView(tmp_path)
    run.refresh()
    worst = worst_groups(run, records)[0]
    assert (worst["round"], worst["verdict"]) == ("train.2.0", "broken")
    shown = [(s["round"], s["indices"]) for s in worst["samples"] if 0 in s["indices"]]
    assert shown == [("train.2.0", [0]), ("train.0.0", [0])]
    assert all(s["pieces"][0].is_shared for s in worst["samples"])


def test_equal_completions_stand_once(tmp_path: Path) -> None:
    records = make_run(tmp_path, [group_of([1], [1], [1], [2], text="seven")])
    run = RunView(tmp_path)
    run.refresh()
    [group] = worst_groups(run, records)
    assert [s["indices"] for s in group["samples"]] == [[0, 1, 2], [3]]
    assert group["num_more"] == 0
    shutil.rmtree(tmp_path / "samples")  # the bound on the record's size removes the oldest rounds
    lost = RunView(tmp_path)
    lost.refresh()
    assert worst_groups(lost, records) == []
