"""The first pages: how a run is now, its alarms with their groups, and its curves; and several runs
side by side.

Curves come from ms-swift's `logging.jsonl`, and the monitor's from the record. All share one axis,
optimizer steps done: a training round that begins at step s is at s + 1, where ms-swift logs it
too; an evaluation is at its own step.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from statistics import fmean
from typing import Any

from swift_grpo_ext.record.tables import VERDICTS, DiversityRow
from swift_grpo_ext.timing import PARTS
from swift_grpo_ext.tools.diff import differing_settings, read_args
from swift_grpo_ext.tools.updates import STEP
from swift_grpo_ext.tools.view.charts import Panels, Points, draw
from swift_grpo_ext.tools.view.group import read_group
from swift_grpo_ext.tools.view.runs import Facts, NotFoundError, Run

MAX_ALARMS, MAX_GROUPS, MAX_COMPLETIONS = 50, 4, 8

LAST_STEPS = 20
"""Steps at the end of a run over which its reward and its seconds are averaged."""

LOGGED = {
    "reward": "reward|rewards/.*/mean",
    "length": "completions/mean_length",
    "gap": "rollout_gap/mean",
    "loss": "loss",
    "grad_norm": "grad_norm",
}
"""The values of the log that each panel shows, as regular expressions."""

LEAST_SHARE = 0.02
"""Parts that take a smaller share of a step have no curve."""


def overview_values(run: Run) -> dict[str, Any]:
    """Return the values of `overview.html`; the steps of alarms in training are shaded."""
    facts = run.facts
    alarms = alarm_streaks(facts.diversity)
    panels = make_panels(facts)
    rewards = panels.get("reward", {}).get("reward", [])
    seconds = mean_of_last(panels.get("seconds", {}).get("step", []))
    logdir = read_args(run.run_dir).get("logging_dir") or run.run_dir / "runs"
    return {
        "reward": rewards[-1][1] if rewards else None,
        "mean_reward": mean_of_last(rewards),
        "seconds": seconds,
        "minutes_left": (facts.max_steps - facts.step) * (seconds or 0) / 60,
        "verdict": overall_verdict(facts.diversity),
        "alarms": alarms,
        "worst_groups": worst_groups(run),
        "charts": draw(panels, [s for s in alarms if s[0].round.phase == "train"]),
        "logdir": shlex.quote(str(logdir)),
    }


def runs_values(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the values of `runs.html`: how each run is, and the settings that differ."""
    rewards = [make_panels(run.facts).get("reward", {}).get("reward", []) for run in runs]
    curves = {str(run.run_dir): points for run, points in zip(runs, rewards, strict=True) if points}
    verdicts = [overall_verdict(run.facts.diversity) for run in runs]
    args = [read_args(run.run_dir) for run in runs]
    # A setting that a run lacks is one of versions, and no choice.
    common = set.intersection(*map(set, args))
    return {
        "rows": [*zip(runs, map(mean_of_last, rewards), verdicts, strict=True)],
        "settings": {k: v for k, v in differing_settings(*args).items() if k in common},
        "charts": draw({"reward": curves}),
    }


# --- verdict and alarms ---


def overall_verdict(records: Sequence[DiversityRow]) -> str:
    """Return the worst verdict that gave an alarm, or `unknown`; `none` without rounds."""
    alarming = {r.verdict for r in records if r.alarm or r.verdict == "unknown"}
    return next((v for v in VERDICTS if v in alarming), "healthy" if records else "none")


def alarm_streaks(records: Sequence[DiversityRow]) -> list[list[DiversityRow]]:
    """Return the rounds that gave alarms, first of training, then of evaluations; those in a row
    are one alarm. Rounds that the analyzer's patience waited for gave none."""
    by_phase = sorted(records, key=lambda r: r.round.phase == "eval")
    streaks = groupby(by_phase, key=lambda r: (r.round.phase, r.verdict, bool(r.alarm)))
    return [[*streak] for (_, _, is_alarm), streak in streaks if is_alarm][:MAX_ALARMS]


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


def make_panels(facts: Facts) -> Panels:
    """Return the panels of a run: what was logged, the seconds of steps, then the monitor's metrics
    of training rounds; no curve and no panel without points."""
    panels: Panels = {key: _curves(facts.steps, pattern) for key, pattern in LOGGED.items()}
    evaluated = {int(e[STEP].partition("/")[0]): e for e in facts.logs if "eval_reward" in e}
    panels["reward"] |= _curves(evaluated, "eval_reward")
    panels["seconds"] = _curves_of_seconds(facts.steps)
    training = [record for record in facts.diversity if record.round.phase == "train"]
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
    """Return a curve for the step and for each part that takes a share of it. The first step is
    left out where there are more: a run begins with what it does once."""
    timed = {
        step: {"step": sum(log[f"time/{part}"] for part in PARTS), **log}
        for step, log in steps.items()
        if "time/rollout" in log
    }
    curves = _curves(dict([*timed.items()][len(timed) > 1 :]), "step|time/.*")
    totals = {name: sum(value for _, value in points) for name, points in curves.items()}
    return {n: points for n, points in curves.items() if totals[n] > LEAST_SHARE * totals["step"]}


def mean_of_last(points: Points) -> float | None:
    """Return the mean of a curve's last `LAST_STEPS` steps; None where it has no point."""
    last = [value for step, value in points if step > points[-1][0] - LAST_STEPS]
    return fmean(last) if last else None
