"""Curves of a run, and how charts draw them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from swift_grpo_ext.tools.view import curves
from swift_grpo_ext.tools.view.curves import (
    Curve,
    Scale,
    make_charts,
    make_panels,
)
from swift_grpo_ext.tools.view.runs import Follower, Snapshot
from tests.diversity.runs import frozen_rounds
from tests.diversity.runs import make_run as make_watched_run
from tests.tools.view.runs import Writer, make_rows, make_run


def test_panels_of_a_run(tmp_path: Path) -> None:
    """Group 0 has rewards 0 and 0, group 1 has 0 and 1: the means lie between 0 and 0.5."""
    follower = Follower(make_run(tmp_path / "run"))
    Writer(tmp_path / "run", session=1, start_step=3).write(
        [*make_rows(3), *make_rows(3, phase="eval")]
    )
    follower.refresh()
    panels = make_panels(follower.snapshot, [])
    assert list(panels) == ["reward", "length", "gap"]
    assert [curve.name for curve in panels["reward"]] == [
        "reward", "Accuracy", "Format", "eval reward",
    ]  # fmt: skip
    assert panels["reward"][0].points == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.25)]
    assert panels["reward"][3].points == [(3, 0.25)]  # an evaluation stands at its own step
    assert panels["length"][0].points[0] == (1, 3)


def test_panels_of_the_monitor(tmp_path: Path) -> None:
    records = make_watched_run(tmp_path, frozen_rounds())
    panels = make_panels(Snapshot(version=0), records)
    expected = [(step + 1, records[step].metrics["vendi"]) for step in range(3)]
    assert panels["effective"][0] == Curve(name="vendi", points=expected)
    assert panels["collision"][0].points[2] == (3, -records[2].log10_p)
    assert "reward" not in panels


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    writer, follower = Writer(tmp_path), Follower(tmp_path)
    for step, value in enumerate((math.nan, 0.5, math.inf)):
        writer.write(rows := make_rows(step), scored=False)
        writer.score(rows, gap_mean=value)
    follower.refresh()
    panels = make_panels(follower.snapshot, [])
    assert panels["gap"] == [Curve(name="gap", points=[(2, 0.5)])]


def test_long_curves_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MAX_POINTS", 5)
    assert curves.evenly_spaced(list(range(101))) == [0, 25, 50, 75, 100]
    assert curves.evenly_spaced([1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 1, "0 0.5 1"),
        (-0.03, 1.03, "0 0.5 1"),
        (0.5, 40.5, "10 20 30 40"),
        (3, 4, "3 3.5 4"),
        (-2e-5, 6e-5, "-2e-05 0 2e-05 4e-05 6e-05"),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: str) -> None:
    ticks = Scale(low, high, 100, 20).ticks()
    assert [label for _, label in ticks] == labels.split()
    for place, label in ticks:
        assert place == pytest.approx(100 - 80 * (float(label) - low) / (high - low), abs=0.06)


def test_charts_of_two_runs() -> None:
    """One axis of steps for all, one colour for a name, the second run's curves apart."""
    line = Curve(name="loss", points=[(1, 0.0), (9, 1.0)])
    dot = Curve(name="kl", points=[(4, 0.5)])
    panels = [{"loss": [line]}, {"copies": [dot], "loss": [dot, line]}]
    alarm = {"first": 10, "last": 11, "kind": "broken"}
    loss, copies = make_charts(panels, ["one", "two"], [alarm])
    assert (loss.key, copies.key) == ("loss", "copies")
    assert {(c.x.low, c.x.high) for c in (loss, copies)} == {(0.5, 11.5)}
    assert (copies.y.low, copies.y.high) == (-0.03, 1.03)
    assert (loss.y.low, loss.y.high) == pytest.approx((-0.05, 1.05))
    assert [(run, curve.name) for run, curve in loss.curves] == [
        (0, "loss"), (1, "kl"), (1, "loss"),
    ]  # fmt: skip
    assert loss.colours == {"loss": 0, "kl": 1}
    assert loss.data["curves"][1] == {"name": "two kl", "points": [(4, 0.5)]}
    assert loss.data["axis"] == [0.5, 11.5, 46, 452, 460]
    [alone] = make_charts(panels[:1], ["one"], [])
    assert alone.x(0.5) == 46
    assert alone.x(9.5) == 452
    assert alone.path(line.points) == "M68.6 160.7L429.4 15.3"
    assert alone.path([(5, 0.0)]) == "M249.0 160.7L249.0 160.7"
    assert alone.data["curves"][0]["name"] == "loss"


@pytest.mark.parametrize(("value", "limits"), [(2.0, (1.8, 2.2)), (0.0, (-1.0, 1.0))])
def test_a_flat_curve_has_room(value: float, limits: tuple[float, float]) -> None:
    [chart] = make_charts([{"kl": [Curve(name="kl", points=[(1, value), (2, value)])]}], ["a"], [])
    assert (chart.y.low, chart.y.high) == pytest.approx(limits)
