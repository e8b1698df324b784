"""A run's overview: how it is now, its alarms with their groups, and its curves as charts. Pure.

Curves come from the run's record and from ms-swift's `logging.jsonl`. All
share one axis, optimizer steps done: a training round that begins at step s stands at s + 1, where
ms-swift logs it too; an evaluation stands at its own step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from swift_grpo_ext.diversity import alarms
from swift_grpo_ext.record.query import identifier, literal
from swift_grpo_ext.record.tables import VERDICTS, DiversityRow
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.timing import PARTS, ROLLOUT_PARTS
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.log import LAST_STEPS
from swift_grpo_ext.tools.view.runs import NotFoundError, Run

MAX_ALARMS = 50
MAX_GROUPS, MAX_GROUPS_OF_ROUND = 6, 2
MAX_COMPLETIONS = 16
"""Different completions of a group that an alarm is about."""

MAX_POINTS = 400
"""Points of a curve, evenly spaced: a chart is about as many pixels wide."""

LOGGED = ("loss", "grad_norm")
"""Panels of what ms-swift logs; `--report_to` shows the rest."""

LOGGED_MEANS = {
    "reward": "reward",
    "length": "completions/mean_length",
    "gap": "rollout_gap/mean",
}
"""Curves of a run without a record take these logged means of its samples."""

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

COLLISION = "collision"
FIRST = ("reward", "reward/reward")
"""Panels that come first and largest; the monitor's are folded."""

SHARES = ("copies", "likeness", "ngrams", "passes")
"""Panels of values between 0 and 1: all of that range is drawn, so that noise looks small."""

TIME = "time"
"""Panel of a step's parts, which are stacked."""

UNITS = {
    **{"length": "tokens", "length_spread": "tokens", "gap": "nats", "surprisal": "nats"},
    **{TIME: "seconds", "step_time": "seconds", "reward": "reward", "effective": "samples"},
    **{"correct": "samples", COLLISION: "p", **dict.fromkeys(SHARES, "share")},
}
"""The unit of a panel's values, by its key; others have none."""

LAYERS = {
    "generate": "c0",
    "other rollout": "c0 light",
    "wake": "c2",
    "send": "c3",
    "sleep": "c2 light",
    "rewards": "c3 light",
    "batch": "c4",
    "logps": "c1 light",
    "loss": "c1",
    "optimizer": "c5 light",
    "rest": "c5",
}
"""Parts from the bottom, and their colours: what belongs together has one."""

MIN_SHARE = 0.001
"""Of a run: smaller parts are left out, as nobody would see them."""

NUM_COLOURS = 6

MEANS = """
select phase, step, avg(case when turn = 0 then reward end) as reward,
       sum(num_tokens) / count(*) filter (turn = 0) as length,
       avg(case when turn = 0 then gap_mean end) as gap {functions}
from scored group by all
"""
"""All turns of a conversation are one sample."""

Points = list[tuple[float, float]]
"""(step, value), by step."""

Panels = dict[str, dict[str, Points]]
"""Curves by name, by the panel that they share: its key is that of the title in `words.json`."""


# --- verdict and alarms ---


def overall_verdict(records: Sequence[DiversityRow]) -> str:
    """Return the worst verdict that gave an alarm, or `unknown`; `none` without rounds."""
    alarming = {r.verdict for r in records if r.alarm or r.verdict == "unknown"}
    return next((v for v in VERDICTS if v in alarming), "healthy" if records else "none")


def list_alarms(records: Sequence[DiversityRow]) -> list[dict[str, Any]]:
    """Return the alarms of training, then those of evaluations, with causes as (English, Chinese).

    Rounds in a row are one. Only rounds that gave an alarm count, as in the log: not those that the
    analyzer's patience waited for.
    """
    by_phase = sorted(records, key=lambda r: r.round.phase == "eval")
    streaks = groupby(by_phase, key=lambda r: (r.round.phase, r.verdict, bool(r.alarm)))
    alarming = [list(streak) for (_, _, is_alarm), streak in streaks if is_alarm]
    listed = []
    for streak in alarming[:MAX_ALARMS]:
        first, last = streak[0], streak[-1]
        is_broken = first.verdict == "broken"
        # The most improbable round tells most of broken randomness, the last one of a collapse.
        told = min(streak, key=lambda r: r.log10_p) if is_broken else last
        listed.append(
            {
                "kind": first.verdict,
                "phase": first.round.phase,
                "first_step": first.steps_done,
                "last_step": last.steps_done,
                "num_rounds": len(streak),
                "remedy": told.remedy,
                "cause": [alarms.describe_cause(told, lang) for lang in alarms.LANGUAGES],
                "collisions": [
                    [alarms.describe_collision(collision, lang) for lang in alarms.LANGUAGES]
                    for collision in (told.collisions if is_broken else ())
                ],
            }
        )
    return listed


# --- curves ---


def make_panels(
    run: Run,
    records: Sequence[DiversityRow],
    logs: Mapping[int, dict[str, Any]] | None = None,
) -> Panels:
    """Return rewards and lengths of the record, what was logged, gaps, the parts of the steps, then
    the monitor's metrics and its collision test of the training rounds; no curve and no panel
    without points. All turns of a conversation are one sample.

    Args:
        logs: what was logged of a step, by its number (`read_steps`).
    """
    logs = logs or {}
    functions = run.facts.functions
    means = run.record.rows(MEANS.format(functions="".join(map(_mean_of_function, functions))))
    trained_means = [(row["step"] + 1, row) for row in means if row["phase"] == "train"]
    eval_means = [(row["step"], row) for row in means if row["phase"] == "eval"]
    recorded = {
        name: _points((step, row[name]) for step, row in trained_means)
        for name in ("reward", "length", "gap", *functions)
    }
    for name, key in LOGGED_MEANS.items():
        recorded[name] = recorded[name] or _points((s, log.get(key)) for s, log in logs.items())
    evaluated = _points((step, row["reward"]) for step, row in eval_means)
    panels: Panels = {
        "reward": {
            **{name: recorded[name] for name in ("reward", *functions)},
            "eval reward": evaluated,
        },
        "length": {"length": recorded["length"]},
        **{
            name: {name: _points((step, log.get(name)) for step, log in logs.items())}
            for name in LOGGED
        },
        "gap": {"gap": recorded["gap"]},
        TIME: time_layers(logs),
    }
    training = [record for record in records if record.round.phase == "train"]
    for key, metrics in DIVERSITY.items():
        panels[key] = {
            name: _points((r.steps_done, r.metrics.get(name)) for r in training) for name in metrics
        }
    tested = ((r.steps_done, -r.log10_p) for r in training if r.num_pairs)
    panels[COLLISION] = {"-log10 p": _points(tested)}
    filled = {key: {n: p for n, p in curves.items() if p} for key, curves in panels.items()}
    return {key: curves for key, curves in filled.items() if curves}


def _mean_of_function(name: str) -> str:
    return f", avg(case when turn = 0 then rewards[{literal(name)}] end) as {identifier(name)}"


def time_layers(logs: Mapping[int, dict[str, Any]]) -> dict[str, Points]:
    """Return the seconds of each part of the steps that were timed; parts do not overlap."""
    layers: dict[str, Points] = {name: [] for name in LAYERS}
    timed = [(step, log) for step, log in logs.items() if "time/rollout" in log]
    for step, log in evenly_spaced(timed, MAX_POINTS):
        seconds = {part: log[f"time/{part}"] for part in (*PARTS, *ROLLOUT_PARTS)}
        engine = sum(seconds[part] for part in ROLLOUT_PARTS)
        seconds["other rollout"] = max(seconds.pop("rollout") - engine, 0.0)
        for name, points in layers.items():
            points.append((step, seconds[name]))
    sums = {name: sum(value for _, value in points) for name, points in layers.items()}
    least = MIN_SHARE * sum(sums.values())
    return {name: points for name, points in layers.items() if sums[name] > least}


def _points(values: Iterable[tuple[int, float | None]]) -> Points:
    known = [(x, y) for x, y in values if y is not None and math.isfinite(y)]
    return evenly_spaced(sorted(known), MAX_POINTS)


def evenly_spaced(values: list[Any], count: int) -> list[Any]:
    """Return at most `count` of some values, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, count).round().astype(int)]


# --- charts ---


def make_charts(
    panels: Panels, alarms: Sequence[dict[str, Any]] = (), runs: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return a chart for each panel, as `script.js` draws it: the values of its curves at `steps`,
    None where a curve has none, the `unit` of its values, and their `range` where it is not that of
    the values. `place` says where it stands: `first`, `main` or `diversity`.

    All have one axis of steps, so that what happened at the same time stands at the same place.

    Args:
        alarms: those of `list_alarms` whose steps are shaded.
        runs: the names of the curves, where each is a run's: a run has one colour in all charts.
    """
    steps = [step for curves in panels.values() for points in curves.values() for step, _ in points]
    steps += [alarm[end] for alarm in alarms for end in ("first_step", "last_step")]
    charts = []
    for key, curves in panels.items():
        panel = key.partition("/")[0]
        chart: dict[str, Any] = {"key": key, "axis": [min(steps) - 0.5, max(steps) + 0.5]}
        if panel in (*DIVERSITY, COLLISION):
            chart["place"] = "diversity"
        else:
            chart["place"] = "first" if key in FIRST else "main"
        chart["unit"] = UNITS.get(panel, "")
        chart["steps"] = sorted({step for points in curves.values() for step, _ in points})
        chart["curves"] = []
        for number, (name, points) in enumerate(curves.items()):
            value_at = {step: float(f"{value:.5g}") for step, value in points}
            place = runs.index(name) if runs else number
            colour = LAYERS.get(name, "c5") if key == TIME else f"c{place % NUM_COLOURS}"
            values = [value_at.get(step) for step in chart["steps"]]
            chart["curves"].append({"name": name, "colour": colour, "values": values})
        chart["range"] = [-0.03, 1.03] if panel in SHARES else None
        chart["is_stacked"], chart["cut"] = key == TIME, None
        if chart["is_stacked"]:
            # A run begins with what it does once: its first step may be cut.
            layers = (map(_value, points) for points in curves.values())
            totals = [*map(sum, zip(*layers, strict=True))]
            chart["range"] = [0.0, max(totals[1:] or totals) * 1.05]
            if totals[0] > chart["range"][1]:
                chart["cut"] = [chart["steps"][0], totals[0]]
        charts.append(chart)
    return charts


def compare_curves(panels_of_runs: Mapping[str, Panels]) -> Panels:
    """Return a panel for each curve of several runs, in which each run has one."""
    compared: Panels = {}
    for run, panels in panels_of_runs.items():
        for key, curves in panels.items():
            if key == TIME:
                layers = zip(*curves.values(), strict=True)
                sums = [(points[0][0], sum(map(_value, points))) for points in layers]
                key, curves = "step_time", {"": sums}
            for name, points in curves.items():
                compared.setdefault(f"{key}/{name}" if len(curves) > 1 else key, {})[run] = points
    return compared


def _value(point: tuple[float, float]) -> float:
    return point[1]


def mean_of_last(points: Points) -> float | None:
    """Return the mean of a curve's last `LAST_STEPS` steps; None where it has no point."""
    last = [value for step, value in points if step > points[-1][0] - LAST_STEPS]
    return float(np.mean(last)) if last else None


# --- the groups that alarms are about ---


def alarm_groups(run: RunView, records: Sequence[DiversityRow]) -> list[dict[str, Any]]:
    """Return groups of the rounds that gave alarms, the most improbable first, as `RunView.group`
    has them, each with its `verdict`. Frozen noise stands beside what it repeats; equal completions
    stand once, with all their indices. Groups that the record has lost are left out."""

    def badness(record: DiversityRow) -> tuple[Any, ...]:
        return VERDICTS.index(record.verdict), record.log10_p, record.round.step

    ranked = sorted((record for record in records if record.alarm), key=badness)
    wanted = [(r, group) for r in ranked for group in r.worst_groups[:MAX_GROUPS_OF_ROUND]]
    shown = []
    for record, number in wanted[:MAX_GROUPS]:
        earlier = []
        for collision in record.collisions:
            if any(origin["sample_id"]["group"] == number for origin in collision["samples"]):
                for origin in collision["earlier"][-1:]:
                    place = origin["sample_id"]
                    name = RoundId(place["phase"], place["step"], place["number"])
                    earlier.append((name, place["group"], place["index"]))
        try:
            group = run.group(record.round, number, earlier)
        except NotFoundError:
            continue
        equal: dict[tuple[Any, ...], dict[str, Any]] = {}
        for sample in sorted(group["samples"], key=_tokens):
            key = (*_tokens(sample), sample["is_earlier"])
            equal.setdefault(key, {**sample, "indices": []})["indices"].append(sample["index"])
        completions = list(equal.values())
        group["samples"] = completions[:MAX_COMPLETIONS]
        group["num_more"] = len(completions) - len(group["samples"])
        shown.append({**group, "verdict": record.verdict})
    return shown


def _tokens(sample: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(turn["token_ids"]) for turn in sample["turns"]]
