"""Several runs side by side: their curves, the settings in which they differ, and two of them
paired sample by sample and prompt by prompt, as `diff` and `compare` do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift_grpo_ext.tools.diff import (
    Decode,
    Difference,
    Pair,
    compare,
    diff,
    differing_settings,
    from_where_they_part,
    read_args,
    read_pair,
)
from swift_grpo_ext.tools.view import overview
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.runs import NEWEST, describe

MAX_CHARACTERS = 200
"""Characters of a differing value that the page shows."""

NEWEST_GROUP = f"from scored where fingerprint = ? order by {NEWEST}"

MAX_PROMPTS = 20
"""Prompts that are shown of two runs: those whose rewards differ most."""


def names_of(runs: Sequence[RunView]) -> list[str]:
    """Return each run's name; its folder where two have one name."""
    names = [run.name for run in runs]
    return names if len({*names}) == len(names) else [str(run.run_dir) for run in runs]


def runs_values(runs: Sequence[RunView]) -> dict[str, Any]:
    """Return the values of `runs.html`: what each run is, and a chart for each curve, in which each
    run has its colour."""
    rows, panels_of_runs = [], {}
    args = [read_args(run.run_dir) for run in runs]
    for name, run in zip(names_of(runs), runs, strict=True):
        records = run.facts.diversity
        panels = overview.make_panels(run, records, run.log.steps)
        panels_of_runs[name] = panels
        rewards = panels.get("reward", {}).get("reward", [])
        steps = [step for curves in panels.values() for p in curves.values() for step, _ in p]
        rows.append(
            {
                "name": name,
                "steps": max(steps, default=0),
                "samples": run.facts.num_rows,
                "last_reward": overview.mean_of_last(rewards),
                "state": run.state,
                "verdict": overview.overall_verdict(records),
            }
        )
    return {
        "rows": rows,
        "settings": {
            name: values
            for name, values in differing_settings(*args).items()
            if all(name in own for own in args)  # else versions differ, and no choice
        },
        "charts": overview.make_charts(
            overview.compare_curves(panels_of_runs), runs=[*panels_of_runs]
        ),
        "is_live": True,
    }


def pair_values(runs: Sequence[RunView], numbers: tuple[int, int]) -> dict[str, Any]:
    """Return the values of `pair.html`: where two runs part, and what the prompts gained that both
    met; `problems` say what could not be compared."""
    one, other = (runs[number] for number in numbers)
    names = [names_of(runs)[number] for number in numbers]
    values: dict[str, Any] = {"names": names, "numbers": numbers, "problems": []}
    try:
        found = diff(one.record, other.record)
    except (OSError, ValueError) as e:
        values["problems"].append(str(e))
    else:
        values["diff"], part = found, found.difference
        values["parted"] = part and _shown(part, (one.decode, other.decode))
    try:
        pair = read_pair((one.record, other.record))
        seeds = dict.fromkeys(str(read_args(run.run_dir).get("seed")) for run in (one, other))
        values["comparison"] = compare({" and ".join(seeds): pair})
    except (OSError, ValueError) as e:
        values["problems"].append(str(e))
    else:
        values["paired"] = pair
        values["num_equal"] = sum(mean == other_mean for mean, other_mean in pair.common.values())
        values["prompts"] = _prompts_apart((one, other), pair)
    return values


def _shown(found: Difference, decoders: Sequence[Decode | None]) -> list[str | None]:
    """Return the first values that differ, None where a run has none: of tokens their texts, of
    texts the places where they part."""
    one, other = found.values
    if isinstance(one, str) and isinstance(other, str):
        return list(from_where_they_part(one, other))
    shown: list[str | None] = []
    for value, decode in zip((one, other), decoders, strict=True):
        if found.what == "tokens" and isinstance(value, dict):
            shown.append(str(value["id"][0]) if decode is None else repr(decode(value["id"])))
        else:
            is_missing = found.what == "tokens" or value in (None, False)
            shown.append(None if is_missing else str(value)[:MAX_CHARACTERS])
    return shown


def _prompts_apart(runs: Sequence[RunView], pair: Pair) -> list[dict[str, Any]]:
    """Return the prompts whose mean rewards differ most, each with its newest group in each run."""
    apart = [(prompt, means) for prompt, means in pair.common.items() if means[0] != means[1]]
    apart.sort(key=lambda each: -abs(each[1][1] - each[1][0]))
    prompts = []
    for fingerprint, means in apart[:MAX_PROMPTS]:
        groups = []
        for run in runs:
            rows = run.record.rows(f"{NEWEST_GROUP} limit 1", [fingerprint])
            groups.append(describe(rows[0]) if rows else None)
        if known := next(filter(None, groups), None):
            prompts.append({**known, "means": means, "groups": groups})
    return prompts
