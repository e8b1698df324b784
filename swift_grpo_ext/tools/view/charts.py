"""The curves of a report: their points from a run's files, drawn with matplotlib.

All curves have optimizer steps done as their axis: a round that begins at step s stands at s + 1,
where ms-swift logs it too; an evaluation stands at its own step.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swift_grpo_ext.diversity.record import RoundRecord, read_json_lines

MAX_POINTS = 500
"""Of a curve; more are averaged, neighbours together."""

COLOURS = ("#0072b2", "#c44e00", "#00805d", "#a8558a", "#8f6400")
"""Okabe and Ito's, darker, which colour-blind people tell apart."""

LINES, LABELS = "#dfe3e6", "#5c6570"
ALARM_COLOURS = {"broken": "#c62828", "collapse": "#9a5b00"}
CSS_COLOURS = {
    **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)},
    **{colour: f"var(--{kind})" for kind, colour in ALARM_COLOURS.items()},
    **{LINES: "var(--line)", LABELS: "var(--soft)"},
}
"""In the page, a chart takes its colours from the theme."""

STYLE: Any = {
    **{"axes.edgecolor": LINES, "grid.color": LINES, "xtick.color": LABELS, "ytick.color": LABELS},
    **{"axes.spines.right": False, "axes.spines.top": False, "grid.linewidth": 0.6},
    **{"font.size": 8, "svg.fonttype": "none"},
}

WIDTH, HEIGHT = 403.2, 144.0
LEFT, RIGHT, BOTTOM, TOP = 0.09, 0.98, 0.13, 0.96
"""Of a chart in the page: its size in points, and where its axes lie as shares of it."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share a vertical axis."""

    key: str
    """Key of the panel's title in `words.json`."""

    curves: dict[str, list[Point]]
    """Points (step, value) by name; at least one each."""

    low: float | None = None
    """Ends of the vertical axis; None: the data decides."""

    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class AlarmSpan:
    """Steps with an alarm, shaded in all panels."""

    first: float
    last: float
    kind: str
    """`broken` or `collapse`."""


PANELS: tuple[tuple[str, tuple[str, ...], float | None, float | None], ...] = (
    ("copies", ("unique_ratio", "groups_with_duplicates", "common_mode"), 0.0, 1.0),
    ("likeness", ("edit_similarity", "self_bleu"), 0.0, 1.0),
    ("ngrams", ("distinct_1", "distinct_2", "distinct_3"), 0.0, 1.0),
    ("effective", ("vendi", "distinct_answers"), 1.0, None),
    ("correct", ("correct_vendi", "correct_answers"), 1.0, None),
    ("passes", ("pass_at_1", "pass_at_4", "pass_at_16", "equal_rewards"), 0.0, 1.0),
    ("surprisal", ("surprisal",), 0.0, None),
    ("length_spread", ("length_spread",), 0.0, None),
)


def make_panels(log: Sequence[dict[str, Any]], records: Sequence[RoundRecord]) -> list[Panel]:
    """Reward and accuracy first, then diversity, then the collision test; empty ones left out."""
    training = [r for r in records if r.phase == "train"]
    # The mean of each reward function beside their sum; accuracies are among them.
    names = dict.fromkeys(n for row in log for n in row if re.fullmatch(r"reward(s/.*/mean)?", n))
    rewards = {
        name.removeprefix("rewards/").removesuffix("/mean"): [(r["step"], r.get(name)) for r in log]
        for name in names
    }
    drawn = [Panel(key="reward", curves=_known(rewards))]
    for key, kinds, low, high in PANELS:
        curves = {kind: [(r.steps_done, r.metrics.get(kind)) for r in training] for kind in kinds}
        drawn.append(Panel(key=key, curves=_known(curves), low=low, high=high))
    tested = {"-log10 p": [(r.steps_done, -r.log10_p) for r in training if r.num_pairs]}
    drawn.append(Panel(key="collision", curves=_known(tested), low=0.0))
    return [panel for panel in drawn if panel.curves]


def _known(curves: Mapping[str, Sequence[tuple[Any, Any]]]) -> dict[str, list[Point]]:
    """Curves of finite points, in order; without those that have none."""
    known = {
        name: [(float(x), float(y)) for x, y in points if y is not None and isfinite(y)]
        for name, points in curves.items()
    }
    return {name: thin(sorted(points)) for name, points in known.items() if points}


def thin(points: Sequence[Point]) -> list[Point]:
    """At most `MAX_POINTS` points, each the mean of neighbours."""
    if len(points) <= MAX_POINTS:
        return list(points)
    parts = np.array_split(np.array(points), MAX_POINTS)
    return [(float(x), float(y)) for x, y in (part.mean(axis=0) for part in parts)]


def read_log(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The training lines of ms-swift's `logging.jsonl`, with their `step`; of a step that a resumed
    run took again, the last. [] where there is no file."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_json_lines(Path(run_dir) / "logging.jsonl", dict):
        done = str(row.get("global_step/max_steps", "")).partition("/")[0]
        if done.isdecimal() and "loss" in row:
            rows = {step: kept for step, kept in rows.items() if step < int(done)}
            rows[int(done)] = {**row, "step": int(done)}
    return list(rows.values())


# --- drawing ---


def step_limits(panels: Sequence[Panel], spans: Sequence[AlarmSpan]) -> tuple[float, float]:
    """Ends of the horizontal axis, which all panels share."""
    steps = [x for panel in panels for points in panel.curves.values() for x, _ in points]
    steps += [step for span in spans for step in (span.first, span.last)]
    return (min(steps) - 0.5, max(steps) + 0.5) if steps else (0.0, 1.0)


def draw(axes: Axes, panel: Panel, spans: Sequence[AlarmSpan], limits: tuple[float, float]) -> None:
    """Draw one panel."""
    for number, span in enumerate(spans):
        axes.axvspan(
            *(span.first - 0.5, span.last + 0.5),
            color=ALARM_COLOURS[span.kind],
            alpha=0.15,
            linewidth=0,
            gid=f"{panel.key}-{span.kind}-{number}",
        )
    for colour, (name, points) in zip(cycle(COLOURS), panel.curves.items(), strict=False):
        x, y = zip(*points, strict=True)
        style = "o" if len(x) == 1 else "-"
        axes.plot(x, y, style, label=name, color=colour, linewidth=1.3, clip_on=False)
    axes.set_xlim(*limits)
    margin = 0.03 if panel.high is not None else 0.0
    axes.set_ylim(
        bottom=None if panel.low is None else panel.low - margin,
        top=None if panel.high is None else panel.high + margin,
    )
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y")
    axes.tick_params(length=0, labelbottom=True)


def to_svg(panel: Panel, spans: Sequence[AlarmSpan], limits: tuple[float, float]) -> str:
    """One panel as an `<svg>` element for the page; `#title-KEY` names it."""
    with rc_context({**STYLE, "svg.hashsalt": panel.key}):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        draw(figure.add_axes((LEFT, BOTTOM, RIGHT - LEFT, TOP - BOTTOM)), panel, spans, limits)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = re.sub("|".join(CSS_COLOURS), lambda colour: CSS_COLOURS[colour[0]], buffer.getvalue())
    head = f'<svg role="img" aria-labelledby="title-{panel.key}" data-panel="{panel.key}"'
    cursor = f'<line class="cursor" y1="0" y2="{HEIGHT}" hidden="hidden"/></svg>'
    return head + svg.partition("<svg")[2].rpartition("</svg>")[0] + cursor


def write_png(
    panels: Sequence[Panel], spans: Sequence[AlarmSpan], titles: Sequence[str], path: Path
) -> None:
    """All panels in one picture, for people in a terminal.

    Raises:
        OSError: the file cannot be written.
    """
    rows = max(-(-len(panels) // 2), 1)
    limits = step_limits(panels, spans)
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 2.3 * rows + 0.3), layout="constrained")
        grid = figure.subplots(rows, 2, squeeze=False).flatten()
        for axes, panel, title in zip(grid, panels, titles, strict=False):
            draw(axes, panel, spans, limits)
            axes.set_title(title, fontsize=9, loc="left")
            axes.legend(fontsize=7, frameon=False)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.savefig(path, dpi=110)
