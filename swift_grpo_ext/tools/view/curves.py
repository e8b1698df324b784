"""The curves of a run: from ms-swift's `logging.jsonl`, `diversity.jsonl` and the run's record.

The axis is optimizer steps done, as in `diversity.charts`: a training round of step s stands at
s + 1, an evaluation at its own step. Pure.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swift_grpo_ext.diversity.alarms import read_words
from swift_grpo_ext.diversity.record import read_records
from swift_grpo_ext.tools.view.charts import PANELS, read_log
from swift_grpo_ext.tools.view.report import alarm_spans
from swift_grpo_ext.tools.view.table import PART, Round, Snapshot, numbers

MAX_POINTS = 1000
"""Of a curve; of more, evenly spaced ones are shown."""

LOGGED: tuple[tuple[str, str], ...] = (
    ("loss", r"(eval_)?loss"),
    ("kl", r"kl|.*_kl|rollout_correction/kl"),
    ("clip_ratio", r"clip_ratio/(low_mean|high_mean|region_mean)"),
    ("grad_norm", r"grad_norm"),
    ("learning_rate", r"learning_rate"),
    ("no_variance", r"frac_reward_zero_std"),
    ("clipped", r"completions/clipped_ratio"),
    ("entropy", r"entropy(/mean)?"),
    ("time", r"step_time|time/.*|profiling/Time taken: .*|.*_seconds"),
)
"""Panels of what ms-swift logs, by the names in `logging.jsonl`."""

RECORDED = (("length", "num_tokens"), ("surprisal", "surprisal"), ("gap", "gap_mean"))
"""Panels of the record's columns."""

Curve = dict[str, Any]
"""`name`, `points` [[step, value], ...], and of the record `band` [[step, low, high], ...]: the
10th and the 90th percentile of the groups' means."""


def make_panels(run_dir: Path, snapshot: Snapshot) -> dict[str, Any]:
    """`panels`: a list of `key`, `curves`, and the `title` in both languages where the report has
    it; `alarms`: spans of steps with their kind."""
    log, records = read_log(run_dir), read_records(run_dir)
    trained = [r for r in records if r.phase == "train"]
    panels: list[dict[str, Any]] = [{"key": "reward", "curves": _rewards(snapshot)}]
    panels += [
        {"key": key, "curves": _recorded(snapshot, {key: column})} for key, column in RECORDED
    ]
    for key, pattern in LOGGED:
        names = dict.fromkeys(name for row in log for name in row if re.fullmatch(pattern, name))
        curves = [_curve(name, [(row["step"], row.get(name)) for row in log]) for name in names]
        panels.append({"key": key, "curves": curves})
    for key, kinds, _, _ in PANELS:
        curves = [_curve(k, [(r.steps_done, r.metrics.get(k)) for r in trained]) for k in kinds]
        if key not in dict(RECORDED):
            panels.append({"key": key, "title": read_words()[key], "curves": curves})
    for panel in panels:
        panel["curves"] = [curve for curve in panel["curves"] if curve["points"]]
    alarms = [{"first": s.first, "last": s.last, "kind": s.kind} for s in alarm_spans(records)]
    return {"panels": [panel for panel in panels if panel["curves"]], "alarms": alarms}


def _rewards(snapshot: Snapshot) -> list[Curve]:
    columns = {"reward": "reward", **{name: PART + name for name in snapshot.functions}}
    curves = _recorded(snapshot, columns)
    evaluated = _recorded(snapshot, {"eval reward": "reward"}, phase="eval")
    return curves + evaluated


def _recorded(snapshot: Snapshot, columns: Mapping[str, str], phase: str = "train") -> list[Curve]:
    """Means of columns over each step's rounds, with bands over groups."""
    of_step: dict[int, list[Round]] = defaultdict(list)
    for found in snapshot.rounds:
        if found.name.phase == phase:
            of_step[found.name.step + (phase == "train")].append(found)
    steps = evenly_spaced(sorted(of_step))
    curves = []
    for name, column in columns.items():
        points, band = [], []
        for step in steps:
            means = np.concatenate([group_means(r, column) for r in of_step[step]])
            if len(means):
                points.append((step, float(means.mean())))
                low, high = np.quantile(means, (0.1, 0.9)).tolist()
                band.append([step, _rounded(low), _rounded(high)])
        curves.append({**_curve(name, points), "band": band})
    return curves


def group_means(of_round: Round, column: str) -> np.ndarray:
    """The mean of a column over each group's samples; groups without a value are left out."""
    if column not in of_round.group_means:
        of_round.group_means[column] = _group_means(of_round, column)
    return of_round.group_means[column]


def _group_means(of_round: Round, column: str) -> np.ndarray:
    if column not in of_round.rows.schema.names:
        return np.empty(0)
    values = numbers(of_round.rows[column])
    known = np.isfinite(values)
    _, groups = np.unique(of_round.rows["group"].to_numpy()[known], return_inverse=True)
    return np.bincount(groups, values[known]) / np.bincount(groups)


def _curve(name: str, points: Sequence[tuple[float, Any]]) -> Curve:
    known = [
        [step, _rounded(float(value))]
        for step, value in points
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    return {"name": name, "points": evenly_spaced(sorted(known))}


def evenly_spaced(values: list[Any]) -> list[Any]:
    """At most `MAX_POINTS` of them, first and last included."""
    if len(values) <= MAX_POINTS:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(int)]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
