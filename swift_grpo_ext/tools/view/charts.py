"""Curves as charts: the numbers of which `chart.html` makes SVG, which needs no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_POINTS = 400
"""Points of a curve, evenly spaced: a chart is about as many pixels wide."""

NUM_COLOURS = 6

LEFT, RIGHT, TOP, BOTTOM = 48, 412, 8, 180
"""The frame of the curves in the picture of `chart.html`, in its units; labels stand outside."""

Points = list[tuple[float, float]]
"""(step, value), by step."""


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


def draw(
    title: str,
    curves: Mapping[str, Points],
    span: tuple[float, float],
    shaded: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a chart as `chart.html` shows it.

    Args:
        title: a key of `words.json`.
        curves: by name.
        span: the first and the last step of the axis.
        shaded: has the `first_step`, `last_step` and `kind` of each alarm.
    """
    first, last = span[0] - 0.5, span[1] + 0.5
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.5 or 0.5
    low, high = low - margin, high + margin

    def x(step: float) -> float:
        return round(LEFT + (step - first) / (last - first) * (RIGHT - LEFT), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)

    shown = []
    for number, (name, points) in enumerate(curves.items()):
        places = [f"{x(step)},{y(value)}" for step, value in evenly_spaced(points, MAX_POINTS)]
        line = " ".join(places if len(places) > 1 else 2 * places)  # a dot, where there is one
        shown.append(
            {"name": name, "colour": number % NUM_COLOURS, "line": line, "last": points[-1][1]}
        )
    return {
        "title": title,
        "curves": shown,
        "step_ticks": [(step, x(step)) for step in ticks(first, last, least=1)],
        "value_ticks": [(value, y(value)) for value in ticks(low, high)],
        "bands": [
            (alarm["kind"], x(start), max(round(x(end) - x(start), 1), 2))
            for alarm in shaded
            for start, end in [(alarm["first_step"] - 0.5, alarm["last_step"] + 0.5)]
        ],
    }
