"""Curves as charts: the numbers of which `chart.html` makes SVG, which needs no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swift_grpo_ext.record.tables import DiversityRow

MAX_POINTS = 400
"""Points of a curve, evenly spaced: a chart is about as many pixels wide."""

LEFT, RIGHT, TOP, BOTTOM = 48, 412, 8, 180
"""The frame of the curves in the picture of `chart.html`, in its units; labels stand outside."""

Points = list[tuple[float, float]]
"""(step, value), by step."""

Panels = dict[str, dict[str, Points]]
"""Curves by name, by the panel that they share."""


def evenly_spaced(values: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of some values, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[i] for i in np.linspace(0, len(values) - 1, count).round().astype(int)]


def ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Return some round numbers between two, at least `least` apart."""
    step = max((high - low) / 4, least)
    size = 10.0 ** math.floor(math.log10(step))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= step * 0.999)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function that takes `low` to `start` and `high` to `end`."""
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def draw(panels: Panels, shaded: Sequence[Sequence[DiversityRow]] = ()) -> list[dict[str, Any]]:
    """Return a chart of each panel for `chart.html`. All have one axis of steps, on which the
    alarms, each a list of rounds, are shaded."""
    steps = [step for curves in panels.values() for points in curves.values() for step, _ in points]
    if not steps:
        return []
    first, last = min(steps) - 0.5, max(steps) + 0.5
    x = scale(first, last, LEFT, RIGHT)
    bands = [(a[0].verdict, x(a[0].steps_done - 0.5), x(a[-1].steps_done + 0.5)) for a in shaded]
    charts = []
    for title, curves in panels.items():
        values = [value for points in curves.values() for _, value in points]
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.5 or 0.5
        low, high = low - margin, high + margin
        y = scale(low, high, BOTTOM, TOP)
        lines = []
        for name, points in curves.items():
            places = [f"{x(step)},{y(value)}" for step, value in evenly_spaced(points, MAX_POINTS)]
            line = " ".join(places if len(places) > 1 else 2 * places)  # one point is a dot
            lines.append({"name": name, "line": line, "last": points[-1][1]})
        charts.append(
            {
                "title": title,
                "curves": lines,
                "step_ticks": [(step, x(step)) for step in ticks(first, last, least=1)],
                "value_ticks": [(value, y(value)) for value in ticks(low, high)],
                "bands": bands,
            }
        )
    return charts
