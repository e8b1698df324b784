"""The overview of a run: curves and how charts draw them, verdict, alarms, worst groups."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools.updates import read_steps
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.overview import (
    alarm_groups,
    compare_curves,
    evenly_spaced,
    list_alarms,
    make_charts,
    make_panels,
    mean_of_last,
    overall_verdict,
)
from swift_grpo_ext.tools.view.runs import Run
from tests.diversity.runs import frozen_rounds
from tests.diversity.runs import make_run as make_watched_run
from tests.diversity.samples import group_of
from tests.tools.view.runs import Writer, add_logs, make_rows


def test_panels_of_a_run(tmp_path: Path) -> None:
    """Group 0 has rewards 0 and 0, group 1 has 0 and 1; what is no number is left out."""
    writer, run = Writer(tmp_path), Run(tmp_path)
    for step, gap in enumerate((math.nan, 0.5, math.inf)):
        rows = make_rows(step)
        writer.write(rows, scored=False)
        writer.score(rows, gap_mean=gap)
    writer.write(make_rows(3, phase="eval"))
    run.refresh()
    assert make_panels(run, []) == {
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
    panels = make_panels(Run(tmp_path), records)
    expected = [(step + 1, records[step].metrics["vendi"]) for step in range(3)]
    assert panels["effective"]["vendi"] == expected
    assert panels["collision"]["-log10 p"][2] == (3, -records[2].log10_p)
    assert "reward" not in panels


def test_the_mean_of_the_last_steps() -> None:
    assert mean_of_last([(step, float(step)) for step in range(1, 41)]) == 30.5
    assert mean_of_last([]) is None


def test_long_curves_are_thinned() -> None:
    assert evenly_spaced(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert evenly_spaced([1, 2], 5) == [1, 2]


def test_charts_share_one_axis_of_steps() -> None:
    line, dot = [(1, 0.0), (9, 1.0)], [(4, 0.123456789)]
    panels = {"gap": {"gap": line, "other": dot}, "copies": {"other": dot}}
    gap, copies = make_charts(panels, [{"first_step": 10, "last_step": 11}])
    assert (gap["key"], copies["key"]) == ("gap", "copies")
    assert gap["axis"] == copies["axis"] == [0.5, 11.5]
    assert (copies["range"], gap["range"]) == ([-0.03, 1.03], None)
    assert (gap["place"], gap["unit"]) == ("main", "nats")
    assert (copies["place"], copies["unit"]) == ("diversity", "share")
    assert gap["steps"] == [1, 4, 9]
    assert gap["curves"] == [
        {"name": "gap", "colour": "c0", "values": [0.0, None, 1.0]},
        {"name": "other", "colour": "c1", "values": [None, 0.12346, None]},
    ]


def test_what_was_logged(tmp_path: Path) -> None:
    """A resumed session replaces the steps that it makes again; a spoilt line is left out."""
    path = add_logs(tmp_path, 1.0, 1.0, 1.0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 1.0, "global\n')
    add_logs(tmp_path, 2.0, 2.0)
    panels = make_panels(Run(tmp_path), [], read_steps(tmp_path))
    assert panels["grad_norm"] == {"grad_norm": [(1, 0.125), (2, 0.25)]}
    assert panels["loss"] == {"loss": [(1, 0.0), (2, 0.0)]}
    assert "kl" not in panels


def test_parts_of_a_step_stand_one_on_the_other(tmp_path: Path) -> None:
    """Each second of a step is in one layer; layers that nobody would see are left out. The first
    step, which was ten times as long, is cut. Steps that nobody timed are left out."""
    path = add_logs(tmp_path, 40.0, 4.0, 8.0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 0.0, "global_step/max_steps": "4/100"}\n')
    panels = make_panels(Run(tmp_path), [], read_steps(tmp_path))
    layers = panels["time"]
    assert list(layers) == ["generate", "other rollout", "wake", "send", "batch", "logps", "loss"]
    assert layers["other rollout"][:2] == [(1, pytest.approx(2)), (2, pytest.approx(0.2))]
    assert [sum(p[i][1] for p in layers.values()) for i in range(3)] == pytest.approx([40, 4, 8])
    chart = make_charts(panels)[-1]
    assert (chart["key"], chart["is_stacked"], chart["steps"]) == ("time", True, [1, 2, 3])
    assert chart["range"] == pytest.approx([0, 8.4])
    assert chart["cut"] == [1, pytest.approx(40)]
    assert [chart["curves"][at]["colour"] for at in (0, -1)] == ["c0", "c1"]
    compared = compare_curves({"one": panels, "two": {"grad_norm": {"grad_norm": [(7, 1.0)]}}})
    assert compared["step_time"] == {"one": [(1, 40.0), (2, 4.0), (3, 8.0)]}
    assert compared["grad_norm"]["one"] == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert compared["grad_norm"]["two"] == [(7, 1.0)]
    assert list(compared)[:2] == ["loss", "grad_norm"]
    charts = {chart["key"]: chart for chart in make_charts(compared, runs=["two", "one"])}
    colours = [curve["colour"] for curve in charts["grad_norm"]["curves"]]
    assert colours == ["c1", "c0"]
    assert charts["loss"]["curves"][0]["colour"] == "c1"  # of a run without the other


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
    assert (collapse["num_rounds"], collapse["collisions"]) == (2, [])
    logged = [record.steps_done for record in records if record.scalars()["diversity/collapse"]]
    assert logged == [3, 4]
    assert "repeat another of their group" in collapse["cause"][0]
    assert "样本共用了随机噪声" in broken["cause"][1]
    assert broken["remedy"] == "remedy_seed_mode"
    assert "the first 60 tokens" in broken["collisions"][0][0]
    verdicts = [overall_verdict(records[:end]) for end in (0, 1, 3, 8)]
    assert verdicts == ["none", "healthy", "collapse", "broken"]  # one odd round is no alarm


def test_frozen_noise_stands_beside_what_it_repeats(tmp_path: Path) -> None:
    records = make_watched_run(tmp_path, frozen_rounds())
    run = RunView(tmp_path)
    run.refresh()
    worst = alarm_groups(run, records)[0]
    assert (worst["round"], worst["verdict"]) == ("train.2.0", "broken")
    shown = [(s["round"], s["indices"]) for s in worst["samples"] if 0 in s["indices"]]
    assert shown == [("train.2.0", [0]), ("train.0.0", [0])]
    assert all(s["pieces"][0].is_shared for s in worst["samples"])


def test_equal_completions_stand_once(tmp_path: Path) -> None:
    rounds = [group_of([1], [1], [1], [2], text="seven"), *(collapsed(step) for step in (1, 2, 3))]
    records = make_watched_run(tmp_path, rounds)
    run = RunView(tmp_path)
    run.refresh()
    [group] = alarm_groups(run, records)
    assert group["round"] == "train.3.0"  # the others gave no alarm
    assert [s["indices"] for s in group["samples"]] == [[0, 1, 2, 3]]
    assert group["num_more"] == 0
    shutil.rmtree(tmp_path / "samples")  # the bound on the record's size removes the oldest rounds
    lost = RunView(tmp_path)
    lost.refresh()
    assert alarm_groups(lost, records) == []
