"""The curves of a report: from `logging.jsonl` and `diversity.jsonl` to points. Pure.

All curves have optimizer steps that are done as their time: a round that begins at step s is drawn
in step s + 1, where ms-swift logs it too; an evaluation stands at its own step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift_grpo_ext.diversity.record import RoundRecord, time_of

MAX_POINTS = 500
"""Of a curve; more are averaged, neighbours together."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel."""

    name: str
    points: list[Point]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share an axis of values."""

    key: str
    """Names the panel's title and note in `report_words.json`."""

    curves: list[Curve]
    low: float | None = None
    """Where the axis of values begins and ends; None for where the values do."""

    high: float | None = None


PANELS: tuple[tuple[str, tuple[str, ...], float | None, float | None], ...] = (
    ("copies", ("unique_ratio", "groups_with_duplicates", "common_mode"), 0.0, 1.0),
    ("likeness", ("edit_similarity", "self_bleu"), 0.0, 1.0),
    ("ngrams", ("distinct_1", "distinct_2", "distinct_3"), 0.0, 1.0),
    ("effective", ("vendi", "distinct_answers"), 1.0, None),
    ("surprisal", ("surprisal",), 0.0, None),
    ("length_spread", ("length_spread",), 0.0, None),
)


def make_panels(log: Sequence[dict[str, Any]], records: Sequence[RoundRecord]) -> list[Panel]:
    """Reward and accuracy first, then diversity, then the collision test; empty ones left out."""
    training = [r for r in records if r.phase == "train"]
    panels = [Panel(key="reward", curves=reward_curves(log))]
    for key, names, low, high in PANELS:
        curves = [_curve(n, ((time_of(r), r.metrics.get(n)) for r in training)) for n in names]
        panels.append(Panel(key=key, curves=curves, low=low, high=high))
    tested = _curve("-log10 p", ((time_of(r), -r.log10_p) for r in training if r.num_pairs))
    panels.append(Panel(key="collision", curves=[tested], low=0.0))
    kept = [[c for c in panel.curves if c.points] for panel in panels]
    return [
        Panel(key=panel.key, curves=curves, low=panel.low, high=panel.high)
        for panel, curves in zip(panels, kept, strict=True)
        if curves
    ]


def reward_curves(log: Sequence[dict[str, Any]]) -> list[Curve]:
    """`reward`, and the mean of each reward function; accuracies are among them."""
    names = dict.fromkeys(
        name
        for row in log
        for name in row
        if name == "reward" or (name.startswith("rewards/") and name.endswith("/mean"))
    )
    return [_curve(_short(n), ((row["step"], row.get(n)) for row in log)) for n in names]


def _short(name: str) -> str:
    return name.removeprefix("rewards/").removesuffix("/mean")


def _curve(name: str, points: Iterable[tuple[float, float | None]]) -> Curve:
    known = [(float(x), float(y)) for x, y in points if y is not None and np.isfinite(y)]
    return Curve(name=name, points=thin(sorted(known)))


def thin(points: Sequence[Point]) -> list[Point]:
    """At most `MAX_POINTS` points, each the mean of neighbours."""
    if len(points) <= MAX_POINTS:
        return list(points)
    parts = np.array_split(np.array(points), MAX_POINTS)
    return [(float(x), float(y)) for x, y in (part.mean(axis=0) for part in parts)]


def read_log(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The training lines of ms-swift's `logging.jsonl`, with their `step`; of a step that a resumed
    run took again, the last. [] where there is no file."""
    path = Path(run_dir) / "logging.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by a crash
        done = str(row.get("global_step/max_steps", "")).partition("/")[0]
        if done.isdigit() and "loss" in row:
            rows = {step: kept for step, kept in rows.items() if step < int(done)}
            rows[int(done)] = {**row, "step": int(done)}
    return list(rows.values())
