"""Curves as charts."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from swift_grpo_ext.tools.view import overview
from swift_grpo_ext.tools.view.overview import draw, evenly_spaced, ticks


def test_long_curves_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evenly_spaced(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert evenly_spaced([1, 2], 5) == [1, 2]
    monkeypatch.setattr(overview, "MAX_POINTS", 3)
    [chart] = draw({"loss": {"loss": [(step, 0.5) for step in range(9)]}})
    [curve] = chart["curves"]
    assert len(curve["line"].split()) == 3


@pytest.mark.parametrize(
    ("low", "high", "least", "expected"),
    [
        (0.0, 1.0, 0.0, [0, 0.5, 1]),
        (0.5, 12.5, 1.0, [5, 10]),
        (0.5, 2.5, 1.0, [1, 2]),
        (-3e-6, 5e-6, 0.0, [-2e-6, 0, 2e-6, 4e-6]),
        (1e5, 9e5, 0.0, [2e5, 4e5, 6e5, 8e5]),
    ],
)
def test_ticks_are_round(low: float, high: float, least: float, expected: list[float]) -> None:
    assert ticks(low, high, least) == pytest.approx(expected)


def test_a_chart() -> None:
    """Curves of unequal lengths share an axis; an alarm is shaded, and a single point is a dot."""
    curves = {"reward": [(1, 0.0), (9, 1.0)], "eval_reward": [(5, 0.5)]}
    alarm = MagicMock(verdict="broken", steps_done=9)
    [chart, short] = draw({"reward": curves, "loss": {"loss": [(9, 0.0)]}}, [[alarm]])
    reward, evaluated = chart["curves"]
    assert (reward["name"], reward["last"]) == ("reward", 1.0)
    assert reward["line"] == "68.2,172.2 391.8,15.8"
    assert evaluated["line"] == "230.0,94.0 230.0,94.0"
    assert chart["value_ticks"] == [(0.0, 172.2), (0.5, 94.0), (1.0, 15.8)]
    assert chart["step_ticks"] == short["step_ticks"] == [(5.0, 230.0)]
    assert chart["bands"] == short["bands"] == [("broken", 371.6, 412)]


@pytest.mark.parametrize("value", [0.0, -2.0, 1e-9, 1e12])
def test_a_level_curve_stands_in_the_middle(value: float) -> None:
    [chart] = draw({"loss": {"loss": [(3, value), (4, value)]}})
    [curve] = chart["curves"]
    assert curve["line"] == "139.0,94.0 321.0,94.0"
