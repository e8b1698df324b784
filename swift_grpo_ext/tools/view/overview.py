"""A run's overview: how it is now, its alarms with their groups, and its curves.

Curves come from the run's record and from ms-swift's `logging.jsonl`. All share one axis, optimizer
steps done: a training round that begins at step s is at s + 1, where ms-swift logs it too; an
evaluation is at its own step.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from statistics import fmean
from typing import Any

from swift_grpo_ext.diversity import alarms
from swift_grpo_ext.record.query import identifier, literal
from swift_grpo_ext.record.tables import VERDICTS, DiversityRow
from swift_grpo_ext.tools.diff import read_args
from swift_grpo_ext.tools.view.charts import Points, draw
from swift_grpo_ext.tools.view.group import read_group
from swift_grpo_ext.tools.view.runs import NotFoundError, Run

MAX_ALARMS, MAX_GROUPS, MAX_COMPLETIONS = 50, 4, 8

LAST_STEPS = 20
"""Steps at the end of a run over which its reward and its seconds are averaged."""

LOGGED_MEANS = {
    "reward": "reward",
    "length": "completions/mean_length",
    "gap": "rollout_gap/mean",
}
"""Curves of a run without a record take these logged means of its samples."""

LEAST_SHARE = 0.02
"""Parts that take a smaller share of a step have no curve."""

DIVERSITY = "diversity/"
"""Stands before the monitor's metrics, as in the log."""

MEANS = """
select phase, step, avg(case when turn = 0 then reward end) as reward,
       sum(num_tokens) / count(*) filter (turn = 0) as length,
       avg(case when turn = 0 then gap_mean end) as gap {functions}
from scored group by all order by step
"""
"""All turns of a conversation are one sample."""

Panels = dict[str, dict[str, Points]]
"""Curves by name, by the panel that they share."""


def overview_values(run: Run) -> dict[str, Any]:
    """Return the values of `overview.html`: how the run is now, its alarms with their groups, and
    its curves, in which alarms in training are shaded."""
    records, log = run.facts.diversity, run.log
    listed = list_alarms(records)
    shaded = [alarm for alarm in listed if alarm["phase"] == "train"]
    panels = make_panels(run)
    steps = [step for curves in panels.values() for points in curves.values() for step, _ in points]
    span = min(steps, default=0), max(steps, default=0)
    charts = [draw(key, curves, span, shaded) for key, curves in panels.items()]
    rewards = panels.get("reward", {}).get("reward", [])
    seconds = mean_of_last(panels.get("seconds", {}).get("step", []))
    trained = [name.step + 1 for name in run.facts.rounds if name.phase == "train"]
    return {
        "log": log,
        "step": max([log.step, *trained]),  # some steps may not be logged
        "reward": rewards[-1][1] if rewards else None,
        "mean_reward": mean_of_last(rewards),
        "seconds": seconds,
        "minutes_left": (log.max_steps - log.step) * (seconds or 0) / 60,
        "verdict": overall_verdict(records),
        "alarms": listed,
        "worst_groups": worst_groups(run),
        "charts": [chart for chart in charts if not chart["title"].startswith(DIVERSITY)],
        "diversity_charts": [chart for chart in charts if chart["title"].startswith(DIVERSITY)],
        "logdir": shlex.quote(
            str(read_args(run.run_dir).get("logging_dir") or run.run_dir / "runs")
        ),
    }


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
                "remedy": told.remedy,
                "cause": [alarms.describe_cause(told, lang) for lang in alarms.LANGUAGES],
                "collisions": [
                    [alarms.describe_collision(collision, lang) for lang in alarms.LANGUAGES]
                    for collision in (told.collisions if is_broken else ())
                ],
            }
        )
    return listed


def worst_groups(run: Run) -> list[dict[str, Any]]:
    """Return the worst group of each of the most improbable rounds that gave alarms, as
    `read_group` has it, with the samples that share most; what the record has lost is left out."""
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


def make_panels(run: Run) -> Panels:
    """Return rewards and lengths of the record, what was logged, gaps, the seconds of the steps,
    then the monitor's metrics of the training rounds; no curve and no panel without points. All
    turns of a conversation are one sample."""
    functions, logs = run.facts.functions, run.log.steps
    means = run.record.rows(MEANS.format(functions="".join(map(_mean_of_function, functions))))
    recorded = {
        name: _points((row["step"] + 1, row[name]) for row in means if row["phase"] == "train")
        for name in ("reward", "length", "gap", *functions)
    }
    for name, key in LOGGED_MEANS.items():
        recorded[name] = recorded[name] or _logged(logs, key)
    evaluated = _points((row["step"], row["reward"]) for row in means if row["phase"] == "eval")
    panels: Panels = {
        "reward": {name: recorded[name] for name in ("reward", *functions)},
        "length": {"length": recorded["length"]},
        "gap": {"gap": recorded["gap"]},
        "loss": {"loss": _logged(logs, "loss")},
        "grad_norm": {"grad_norm": _logged(logs, "grad_norm")},
        "seconds": _curves_of_seconds(run.log.seconds),
    }
    panels["reward"]["eval reward"] = evaluated
    training = [record for record in run.facts.diversity if record.round.phase == "train"]
    scalars = {record.steps_done: record.scalars() for record in training}
    for name in dict.fromkeys(name for logged in scalars.values() for name in logged):
        panels[name] = {name: _logged(scalars, name)}
    filled = {key: {n: p for n, p in curves.items() if p} for key, curves in panels.items()}
    return {key: curves for key, curves in filled.items() if curves}


def _mean_of_function(name: str) -> str:
    return f", avg(case when turn = 0 then rewards[{literal(name)}] end) as {identifier(name)}"


def _logged(logs: Mapping[int, Mapping[str, Any]], name: str) -> Points:
    return _points((step, log.get(name)) for step, log in logs.items())


def _points(values: Iterable[tuple[int, float | None]]) -> Points:
    return [(x, y) for x, y in values if y is not None and math.isfinite(y)]


def _curves_of_seconds(seconds: Mapping[int, Mapping[str, float]]) -> dict[str, Points]:
    """Return a curve for the step and for each part that takes a share of it."""
    totals: Counter[str] = Counter()
    for parts in seconds.values():
        totals.update(parts)
    least = LEAST_SHARE * totals["step"]
    return {name: _logged(seconds, name) for name, total in totals.items() if total > least}


def mean_of_last(points: Points) -> float | None:
    """Return the mean of a curve's last `LAST_STEPS` steps; None where it has no point."""
    last = [value for step, value in points if step > points[-1][0] - LAST_STEPS]
    return fmean(last) if last else None
