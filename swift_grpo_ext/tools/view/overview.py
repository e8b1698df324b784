"""Makes the values of a run's overview (figures, alarms with their groups, and charts), and of the
page of several runs.

Curves come from ms-swift's `logging.jsonl`, and the monitor's from the record. All share one axis,
optimizer steps done.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np

from swift_grpo_ext.record.tables import VERDICTS, DiversityRow
from swift_grpo_ext.timing import PARTS
from swift_grpo_ext.tools.diff import differing_settings, read_args
from swift_grpo_ext.tools.runs import STEP
from swift_grpo_ext.tools.view.group import read_group
from swift_grpo_ext.tools.view.runs import Facts, NotFoundError, Run

MAX_ALARMS, MAX_GROUPS, MAX_COMPLETIONS = 50, 4, 8
LAST_STEPS = 20  # at the end of a run, over which its reward and its seconds are averaged
LEAST_SHARE = 0.02  # of a step's seconds: smaller parts have no curve
MAX_POINTS = 400  # of a curve: a chart is about as many pixels wide

# The frame of the curves in the picture that `parts.html` draws; labels stand outside.
LEFT, RIGHT, TOP, BOTTOM = 48, 412, 8, 180

# The values of the log that each panel shows, as regular expressions.
LOGGED = {
    "reward": "reward|rewards/.*/mean",
    "length": "completions/mean_length",
    "gap": "rollout_gap/mean",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "memory": "memory/.*",
}

Points = list[tuple[float, float]]  # (step, value), by step
Panels = dict[str, dict[str, Points]]  # by panel, curves by name


def overview_values(run: Run) -> dict[str, Any]:
    """Return the values of `overview.html`."""
    facts = run.facts
    panels, alarms = make_panels(facts), alarm_streaks(facts.diversity)
    rewards = panels.get("reward", {}).get("reward", [])
    seconds = mean_of_last(panels.get("seconds", {}).get("step", []))
    return {
        "reward": rewards[-1][1] if rewards else None,
        "mean_reward": mean_of_last(rewards),
        "seconds": seconds,
        "minutes_left": (facts.max_steps - facts.step) * (seconds or 0) / 60,
        "verdict": overall_verdict(facts.diversity),
        "alarms": alarms,
        "worst_groups": worst_groups(run),
        "charts": draw(panels, [rounds for rounds in alarms if rounds[0].round.phase == "train"]),
    }


def runs_values(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the values of `runs.html`: the state of each run, and the settings that differ."""
    rewards = [make_panels(run.facts).get("reward", {}).get("reward", []) for run in runs]
    curves = {str(run.run_dir): points for run, points in zip(runs, rewards, strict=True) if points}
    verdicts = [overall_verdict(run.facts.diversity) for run in runs]
    return {
        "rows": [*zip(runs, map(mean_of_last, rewards), verdicts, strict=True)],
        "charts": draw({"reward": curves}),
        "settings": differing_settings(*(read_args(run.run_dir) for run in runs)),
    }


# --- verdict and alarms ---


def overall_verdict(records: Sequence[DiversityRow]) -> str:
    """Return the worst verdict that gave an alarm, or `unknown`; `none` without rounds."""
    alarming = {r.verdict for r in records if r.alarm or r.verdict == "unknown"}
    return next((v for v in VERDICTS if v in alarming), "healthy" if records else "none")


def alarm_streaks(records: Sequence[DiversityRow]) -> list[list[DiversityRow]]:
    """Return the alarms of training, then those of evaluations. Each is a list of consecutive
    rounds that gave it."""
    # Without the flag, a streak would begin with collapsed rounds that gave no alarm (`PATIENCE`).
    by_phase = sorted(records, key=lambda r: r.round.phase == "eval")
    streaks = groupby(by_phase, key=lambda r: (r.round.phase, r.verdict, bool(r.alarm)))
    return [[*streak] for (_, _, is_alarm), streak in streaks if is_alarm][:MAX_ALARMS]


def worst_groups(run: Run) -> list[dict[str, Any]]:
    """Return the worst group of each of the most improbable rounds with alarms, as `read_group`
    returns it, with the samples that share most. Groups that the record has lost are left out."""
    alarming = [record for record in run.facts.diversity if record.alarm]
    alarming.sort(key=lambda r: (VERDICTS.index(r.verdict), r.log10_p, r.round.step))
    groups = []
    for record in alarming[:MAX_GROUPS]:
        for number in record.worst_groups[:1]:
            with suppress(NotFoundError):
                group = read_group(run, record.round, number)
                alike = sorted(group["samples"], key=lambda turns: -turns[0]["num_shared"])
                groups.append({**group, "samples": alike[:MAX_COMPLETIONS]})
    return groups


# --- curves ---


def make_panels(facts: Facts) -> Panels:
    """Return the panels of a run: logged values, the seconds of steps, and the monitor's metrics
    of training rounds. No panel and no curve is empty."""
    panels: Panels = {key: _curves(facts.steps, pattern) for key, pattern in LOGGED.items()}
    evaluated = {int(e[STEP].partition("/")[0]): e for e in facts.logs if "eval_reward" in e}
    panels["reward"] |= _curves(evaluated, "eval_reward")
    panels["seconds"] = _curves_of_seconds(facts.steps)
    training = [record for record in facts.diversity if record.round.phase == "train"]
    # A training round that begins at step s is at s + 1, where ms-swift logs it too.
    metrics = _curves({record.steps_done: record.scalars() for record in training}, ".*")
    panels |= {name: {name: points} for name, points in metrics.items()}
    return {key: curves for key, curves in panels.items() if curves}


def _curves(values: Mapping[int, Mapping[str, Any]], pattern: str) -> dict[str, Points]:
    """Return the finite values by step of each name that matches a regular expression."""
    curves: dict[str, Points] = {}
    for step, named in values.items():
        for name, value in named.items():
            if re.fullmatch(pattern, name) and value is not None and math.isfinite(value):
                curves.setdefault(name, []).append((step, value))
    return curves


def _curves_of_seconds(steps: Mapping[int, Mapping[str, Any]]) -> dict[str, Points]:
    """Return a curve for the step and for each part that takes a share of it."""
    timed = {
        step: {"step": sum(log[f"time/{part}"] for part in PARTS), **log}
        for step, log in steps.items()
        if "time/rollout" in log
    }
    # The first of several steps includes work that a run does once.
    curves = _curves(dict([*timed.items()][len(timed) > 1 :]), "step|time/.*")
    totals = {name: sum(value for _, value in points) for name, points in curves.items()}
    return {n: points for n, points in curves.items() if totals[n] > LEAST_SHARE * totals["step"]}


def mean_of_last(points: Points) -> float | None:
    """Return the mean of a curve's last `LAST_STEPS` steps; None if it has no point."""
    last = [value for step, value in points if step > points[-1][0] - LAST_STEPS]
    return fmean(last) if last else None


# --- charts ---


def draw(panels: Panels, alarms: Sequence[Sequence[DiversityRow]] = ()) -> list[dict[str, Any]]:
    """Return a chart of each panel, as numbers from which `parts.html` makes SVG. All have one axis
    of steps, on which alarms are shaded."""
    steps = [step for curves in panels.values() for points in curves.values() for step, _ in points]
    if not steps:
        return []
    first, last = min(steps) - 0.5, max(steps) + 0.5
    x = _scale(first, last, LEFT, RIGHT)
    bands = [(a[0].verdict, x(a[0].steps_done - 0.5), x(a[-1].steps_done + 0.5)) for a in alarms]
    charts = []
    for title, curves in panels.items():
        values = [value for points in curves.values() for _, value in points]
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.5 or 0.5
        low, high = low - margin, high + margin
        y = _scale(low, high, BOTTOM, TOP)
        lines = []
        for name, points in curves.items():
            places = [f"{x(step)},{y(value)}" for step, value in evenly_spaced(points, MAX_POINTS)]
            line = " ".join(places if len(places) > 1 else 2 * places)  # one point becomes a dot
            lines.append({"name": name, "line": line, "last": points[-1][1]})
        step_ticks = [(step, x(step)) for step in ticks(first, last, least=1)]
        value_ticks = [(value, y(value)) for value in ticks(low, high)]
        axes = {"step_ticks": step_ticks, "value_ticks": value_ticks}
        charts.append({"title": title, "curves": lines, "bands": bands, **axes})
    return charts


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function that takes `low` to `start` and `high` to `end`."""
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Return some round numbers between two, at least `least` apart."""
    step = max((high - low) / 4, least)
    size = 10.0 ** math.floor(math.log10(step))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= step * 0.999)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def evenly_spaced(values: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of some values, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(count, len(values)))
    return [values[i] for i in places.round().astype(int)]
