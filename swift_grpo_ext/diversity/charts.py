"""The curves of a report as inline SVG, which takes its colours from the page, and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from swift_grpo_ext.diversity.series import Panel, Point

WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's, which colour-blind people tell apart; the page has lighter ones for the dark."""

ALARM_COLOURS = {"broken": "#c62828", "collapse": "#b26a00"}
NUM_TICKS = 4


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An alarm on the axis of time."""

    time: float
    kind: str
    """`broken` or `collapse`."""

    text: str


@dataclass(frozen=True)
class Axes:
    """From values to places in a panel."""

    first: float
    last: float
    low: float
    high: float

    def x(self, time: float) -> float:
        return LEFT + (time - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def axes_of(panel: Panel, span: tuple[float, float]) -> Axes:
    values = [y for curve in panel.curves for _, y in curve.points]
    low = min(values) if panel.low is None else panel.low
    high = max(values) if panel.high is None else panel.high
    if high - low < 1e-9:
        low, high = (low, low + 1) if panel.low is not None else (low - 0.5, low + 0.5)
    first, last = span
    return Axes(first, max(last, first + 1), low, high)


def span_of(panels: Sequence[Panel], marks: Sequence[Mark]) -> tuple[float, float]:
    """First and last time of all panels, which share the axis."""
    times = [x for p in panels for c in p.curves for x, _ in c.points] + [m.time for m in marks]
    return (min(times), max(times)) if times else (0.0, 1.0)


def svg(panel: Panel, marks: Sequence[Mark], span: tuple[float, float], title: str) -> str:
    """One panel. Classes, not colours: `c0` to `c4` for curves, the kind of each mark."""
    axes = axes_of(panel, span)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-panel="{panel.key}" data-first="{axes.first:g}" data-last="{axes.last:g}">'
    ]
    for value in ticks(axes.low, axes.high):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" '
                     f'y2="{y:.1f}"/><text class="tick" text-anchor="end" x="{LEFT - 6}" '
                     f'y="{y + 4:.1f}">{value:g}</text>')  # fmt: skip
    for time in ticks(axes.first, axes.last, whole=True):
        parts.append(f'<text class="tick" text-anchor="middle" x="{axes.x(time):.1f}" '
                     f'y="{HEIGHT - 6}">{time:g}</text>')  # fmt: skip
    for mark in marks:
        x = f"{axes.x(mark.time):.1f}"
        parts.append(
            f'<line class="mark {mark.kind}" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>{escape(mark.text)}</title></line>"
        )
    for number, curve in enumerate(panel.curves):
        parts.append(_line(curve.points, axes, number % len(COLOURS)))
    return "".join([*parts, '<line class="cursor" y1="10" y2="166" hidden="hidden"/></svg>'])


def _line(points: Sequence[Point], axes: Axes, colour: int) -> str:
    sample_ids = [f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points]
    if len(sample_ids) == 1:
        x, y = sample_ids[0].split(",")
        return f'<circle class="dot c{colour}" cx="{x}" cy="{y}" r="3"/>'
    return f'<polyline class="curve c{colour}" points="{" ".join(sample_ids)}"/>'


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about `NUM_TICKS`; `whole` ones only."""
    rough = (high - low) / NUM_TICKS
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * k for k in (1, 2, 5, 10) if size * k >= rough * 0.999)
    step = max(step, 1) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, int(high / step + 1e-9) + 1)]


def write_png(
    panels: Sequence[Panel], marks: Sequence[Mark], titles: Sequence[str], path: Path
) -> None:
    """All panels in one picture, for people in a terminal.

    Raises:
        OSError: the file cannot be written.
    """
    rows = max(-(-len(panels) // 2), 1)
    figure = Figure(figsize=(11, 2.3 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, 2, sharex=True, squeeze=False).flatten()
    span = span_of(panels, marks)
    for axis, panel, title in zip(grid, panels, titles, strict=False):
        axes = axes_of(panel, span)
        for mark in marks:
            axis.axvline(mark.time, color=ALARM_COLOURS[mark.kind], alpha=0.35, linewidth=1)
        for number, curve in enumerate(panel.curves):
            style = "o" if len(curve.points) == 1 else "-"
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(*zip(*curve.points, strict=True), style, label=curve.name, color=colour)
        margin = (axes.high - axes.low) * 0.04
        axis.set_ylim(axes.low - margin, axes.high + margin)
        axis.set_title(title, fontsize=9, loc="left")
        axis.legend(fontsize=7, frameon=False)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8, labelbottom=True)
    for axis in grid[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=110)
