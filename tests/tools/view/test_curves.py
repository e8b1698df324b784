"""Curves of a run that the monitor watched, with its alarms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_grpo_ext.tools.view import curves
from swift_grpo_ext.tools.view.curves import make_panels
from swift_grpo_ext.tools.view.table import Follower
from tests.diversity.runs import frozen_rounds
from tests.diversity.runs import make_run as make_watched_run
from tests.tools.view.runs import Writer, make_rows


def test_diversity_and_alarms(tmp_path: Path) -> None:
    """Round 2 drew what round 0 drew: after it, three optimizer steps are done."""
    records = make_watched_run(tmp_path, frozen_rounds())
    follower = Follower(tmp_path)
    follower.refresh()
    found = make_panels(tmp_path, follower.snapshot)
    assert found["alarms"] == [{"first": 3, "last": 3, "kind": "broken"}]
    panels = {panel["key"]: panel for panel in found["panels"]}
    expected = [[r.steps_done, r.metrics["vendi"]] for r in records]
    [vendi, *_] = panels["effective"]["curves"]
    assert vendi["name"] == "vendi"
    assert vendi["points"] == [[step, pytest.approx(value, rel=1e-4)] for step, value in expected]
    assert len(panels["effective"]["title"]) == 2
    assert panels["loss"]["curves"][0]["points"] == [[1, 0], [2, 0], [3, 0]]


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    Writer(tmp_path).write(make_rows(0))
    lines = [
        {"loss": value, "global_step/max_steps": f"{step}/3"}
        for step, value in enumerate([float("nan"), 0.5, float("inf")], 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "logging.jsonl").write_text(text, encoding="utf-8")
    follower = Follower(tmp_path)
    follower.refresh()
    panels = {p["key"]: p["curves"] for p in make_panels(tmp_path, follower.snapshot)["panels"]}
    assert [curve["points"] for curve in panels["loss"]] == [[[2, 0.5]]]
    assert {"kl", "copies"}.isdisjoint(panels)


def test_long_curves_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MAX_POINTS", 5)
    assert curves.evenly_spaced(list(range(101))) == [0, 25, 50, 75, 100]
