"""The overview of a run: curves, verdict, alarms, worst groups."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools.view.overview import (
    list_alarms,
    make_panels,
    mean_of_last,
    overall_verdict,
    overview_values,
    worst_groups,
)
from swift_grpo_ext.tools.view.runs import Run
from tests.diversity.runs import frozen_rounds
from tests.diversity.runs import make_run as make_watched_run
from tests.diversity.samples import group_of
from tests.tools.view.runs import Writer, add_logs, add_tokenizer, make_rows


def test_panels_of_a_run(tmp_path: Path) -> None:
    """Group 0 has rewards 0 and 0, group 1 has 0 and 1; what is no number is left out."""
    writer, run = Writer(tmp_path), Run(tmp_path)
    for step, gap in enumerate((math.nan, 0.5, math.inf)):
        rows = make_rows(step)
        writer.write(rows, scored=False)
        writer.score(rows, gap_mean=gap)
    writer.write(make_rows(3, phase="eval"))
    run.refresh()
    assert make_panels(run) == {
        "reward": {
            "reward": [(1, 0.25), (2, 0.25), (3, 0.25)],
            "Accuracy": [(1, 0.25), (2, 0.25), (3, 0.25)],
            "Format": [(1, 1.0), (2, 1.0), (3, 1.0)],
            "eval reward": [(3, 0.25)],  # an evaluation stands at its own step
        },
        "length": {"length": [(1, 3), (2, 3), (3, 3)]},
        "gap": {"gap": [(2, 0.5)]},
    }


def test_panels_of_the_monitor(tmp_path: Path) -> None:
    records = make_watched_run(tmp_path, frozen_rounds())
    run = Run(tmp_path)
    run.refresh()
    panels = make_panels(run)
    expected = [(step + 1, records[step].metrics["vendi"]) for step in range(3)]
    assert panels["diversity/vendi"] == {"diversity/vendi": expected}
    assert panels["diversity/log10_p"]["diversity/log10_p"][2] == (3, records[2].log10_p)
    assert "reward" not in panels
    values = overview_values(run)
    assert [chart["title"] for chart in values["charts"]] == ["length"]
    assert len(values["diversity_charts"]) == len(panels) - 1


def test_the_mean_of_the_last_steps() -> None:
    assert mean_of_last([(step, float(step)) for step in range(1, 41)]) == 30.5
    assert mean_of_last([]) is None


def test_what_was_logged(tmp_path: Path) -> None:
    """A resumed session replaces the steps that it makes again; a spoilt line is left out. Parts
    that take less than 2% of a step have no curve."""
    path = add_logs(tmp_path, 1.0, 1.0, 1.0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 1.0, "global\n')
    add_logs(tmp_path, 8.0, 2.0)
    panels = make_panels(Run(tmp_path))
    assert panels["grad_norm"] == {"grad_norm": [(1, 0.125), (2, 0.25)]}
    assert panels["loss"] == {"loss": [(1, 0.0), (2, 0.0)]}
    assert "kl" not in panels
    expected = ["step", "rollout", "wake", "send", "generate", "batch", "logps", "loss"]
    assert list(panels["seconds"]) == expected
    assert panels["seconds"]["step"] == [(2, pytest.approx(2.0))]


def collapsed(step: int) -> list[SampleRow]:
    """A round whose four samples are equal, at a surprisal that makes it likely."""
    return group_of(*[[1, step]] * 4, step=step, bits=0.01)


def test_alarms_in_a_row_are_one(tmp_path: Path) -> None:
    """Rounds that patience waited for are none, as in the log; spans are in steps done."""
    rounds = [collapsed(step) for step in range(6)]
    rounds[4] = group_of([1], [2], [3], [4], step=4)
    rounds += [group_of(*[list(range(60))] * 2, step=step) for step in (6, 7)]
    rounds.insert(0, group_of(*[list(range(90))] * 2, phase="eval", prompt="other"))
    records = make_watched_run(tmp_path, rounds)
    collapse, broken, of_evaluation = list_alarms(records)
    assert (of_evaluation["phase"], of_evaluation["kind"]) == ("eval", "broken")
    records = [record for record in records if record.round.phase == "train"]
    assert (collapse["phase"], collapse["first_step"], collapse["last_step"]) == ("train", 3, 4)
    assert (broken["kind"], broken["first_step"], broken["last_step"]) == ("broken", 7, 8)
    assert collapse["collisions"] == []
    logged = [record.steps_done for record in records if record.scalars()["diversity/collapse"]]
    assert logged == [3, 4]
    assert "repeat another of their group" in collapse["cause"][0]
    assert "样本共用了随机噪声" in broken["cause"][1]
    assert broken["remedy"] == "remedy_seed_mode"
    assert "the first 60 tokens" in broken["collisions"][0][0]
    verdicts = [overall_verdict(records[:end]) for end in (0, 1, 3, 8)]
    assert verdicts == ["none", "healthy", "collapse", "broken"]  # one odd round is no alarm


def test_the_worst_groups_of_alarms(tmp_path: Path) -> None:
    """Of each round with an alarm the worst group, with the samples that share most."""
    rounds = [group_of([9], [8], [7], [6], step=step) for step in range(2)]
    rounds += [collapsed(step) for step in (2, 3)]
    rounds.append(group_of([5], *[[1, 2, 3]] * 79, step=4, bits=0.01))
    make_watched_run(tmp_path, rounds)
    add_tokenizer(tmp_path)
    run = Run(tmp_path)
    run.refresh()
    [group] = worst_groups(run)  # the others gave no alarm
    assert group["first"]["round"] == "train.4.0"
    assert [turns[0]["index"] for turns in group["samples"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(turns[0]["pieces"][0].is_shared for turns in group["samples"])
    shutil.rmtree(tmp_path / "samples")  # the bound on the record's size removes the oldest rounds
    lost = Run(tmp_path)
    lost.refresh()
    assert worst_groups(lost) == []
