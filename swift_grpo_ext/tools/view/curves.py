"""The curves of a run, and how a chart draws them. Pure.

Their points come from the run's record and from `diversity.jsonl`. All share one axis, optimizer
steps done: a training round that begins at step s stands at s + 1, where ms-swift logs it too; an
evaluation stands at its own step. Loss, KL and times are in ms-swift's own TensorBoard log.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from swift_grpo_ext.diversity.record import RoundRecord
from swift_grpo_ext.tools.view.runs import PART, Snapshot

MAX_POINTS = 400
"""Points of a curve, evenly spaced: a chart is about as many pixels wide."""

DIVERSITY = {
    "copies": ("unique_ratio", "groups_with_duplicates", "common_mode"),
    "likeness": ("edit_similarity", "self_bleu"),
    "ngrams": ("distinct_1", "distinct_2", "distinct_3"),
    "effective": ("vendi", "distinct_answers"),
    "correct": ("correct_vendi", "correct_answers"),
    "passes": ("pass_at_1", "pass_at_4", "pass_at_16", "equal_rewards"),
    "surprisal": ("surprisal",),
    "length_spread": ("length_spread",),
}
"""Panels of the monitor's metrics."""

SHARES = ("copies", "likeness", "ngrams", "passes")
"""Panels of values between 0 and 1: all of that range is drawn, so that noise looks small."""

WIDTH, HEIGHT = 460, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 22
"""Sizes of a chart and of the margins around its axes, in the chart's own units."""

NUM_COLOURS = 6

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named line of one run."""

    name: str
    points: list[Point]
    """(step, value), by step."""


Panels = dict[str, list[Curve]]
"""Curves that share a vertical axis, by the key of the panel's title in `words.json`."""


def make_panels(snapshot: Snapshot, records: Sequence[RoundRecord]) -> Panels:
    """Return rewards, lengths and gaps of the record, then the monitor's metrics and its collision
    test of the training rounds; no empty panel."""
    parts = {name: PART + name for name in snapshot.functions}
    panels = {
        "reward": [
            *_recorded(snapshot, {"reward": "reward", **parts}),
            *_recorded(snapshot, {"eval reward": "reward"}, phase="eval"),
        ],
        "length": _recorded(snapshot, {"length": "num_tokens"}),
        "gap": _recorded(snapshot, {"gap": "gap_mean"}),
    }
    training = [record for record in records if record.phase == "train"]
    for key, names in DIVERSITY.items():
        panels[key] = [
            _curve(name, ((r.steps_done, r.metrics.get(name)) for r in training)) for name in names
        ]
    tested = ((r.steps_done, -r.log10_p) for r in training if r.num_pairs)
    panels["collision"] = [_curve("-log10 p", tested)]
    filled = {key: [c for c in curves if c.points] for key, curves in panels.items()}
    return {key: curves for key, curves in filled.items() if curves}


def _recorded(snapshot: Snapshot, columns: dict[str, str], phase: str = "train") -> list[Curve]:
    """Return the means of columns over each step's groups, by the curves' names."""
    rows = snapshot.groups.filter(pc.equal(snapshot.groups["phase"], phase))
    of_steps = rows.group_by("step").aggregate([(c, "mean") for c in columns.values()])
    steps = of_steps["step"].to_numpy() + (phase == "train")
    return [
        _curve(name, zip(steps.tolist(), of_steps[f"{column}_mean"].to_pylist(), strict=True))
        for name, column in columns.items()
    ]


def _curve(name: str, points: Iterable[tuple[float, Any]]) -> Curve:
    known = [(x, y) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y)]
    return Curve(name=name, points=evenly_spaced(sorted(known)))


def evenly_spaced(values: list[Any]) -> list[Any]:
    """Return at most `MAX_POINTS` of some values, the first and the last among them."""
    if len(values) <= MAX_POINTS:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(int)]


# --- drawing ---


@dataclass(frozen=True)
class Scale:
    """Maps values between `low` and `high` to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return place and label of about five round values."""
        rough = (self.high - self.low) / 4
        power = 10 ** math.floor(math.log10(rough))
        size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        numbers = range(math.ceil(self.low / size), math.floor(self.high / size) + 1)
        return [(self(number * size), f"{number * size:.4g}") for number in numbers]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One panel's curves, of one run or of two, as the macro `chart` of `parts.html` draws them."""

    key: str
    curves: list[tuple[int, Curve]]
    """With the number of each curve's run."""

    alarms: Sequence[dict[str, Any]]
    """Steps that are shaded: `first`, `last` and `kind`."""

    run_names: Sequence[str]
    x: Scale
    y: Scale

    @property
    def colours(self) -> dict[str, int]:
        """The number of each curve's colour, by its name."""
        names = dict.fromkeys(curve.name for _, curve in self.curves)
        return {name: number % NUM_COLOURS for number, name in enumerate(names)}

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """Return the `d` of an SVG path; a single point becomes a dot."""
        if len(points) == 1:
            points = [points[0], points[0]]
        return "M" + "L".join(f"{self.x(step)} {self.y(value)}" for step, value in points)

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script needs to tell the values at a step."""
        prefixes = [f"{name} " if len(self.run_names) > 1 else "" for name in self.run_names]
        return {
            "axis": [self.x.low, self.x.high, self.x.start, self.x.end, WIDTH],
            "curves": [
                {
                    "name": prefixes[run] + curve.name,
                    "points": [(step, float(f"{value:.5g}")) for step, value in curve.points],
                }
                for run, curve in self.curves
            ],
        }


def make_charts(
    panels_of_runs: Sequence[Panels], run_names: Sequence[str], alarms: Sequence[dict[str, Any]]
) -> list[Chart]:
    """Return one chart per panel that any of the runs has.

    All have one axis of steps, so that what happened at the same time stands at the same place.
    """
    curves_of: dict[str, list[tuple[int, Curve]]] = defaultdict(list)
    for run, panels in enumerate(panels_of_runs):
        for key, curves in panels.items():
            curves_of[key] += [(run, curve) for curve in curves]
    steps = [step for found in curves_of.values() for _, c in found for step, _ in c.points]
    steps += [alarm[end] for alarm in alarms for end in ("first", "last")]
    return [
        Chart(
            key=key,
            curves=curves,
            alarms=alarms,
            run_names=run_names,
            x=Scale(min(steps) - 0.5, max(steps) + 0.5, LEFT, WIDTH - RIGHT),
            y=Scale(*_value_limits(key, [curve for _, curve in curves]), HEIGHT - BOTTOM, TOP),
        )
        for key, curves in curves_of.items()
    ]


def _value_limits(key: str, curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the ends of a chart's vertical axis, with room around the curves."""
    if key in SHARES:
        return -0.03, 1.03
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    is_flat = high - low <= 1e-9 * max(abs(low), abs(high))  # equal but for rounding
    room = (abs(high) * 0.1 or 1.0) if is_flat else (high - low) * 0.05
    return low - room, high + room
