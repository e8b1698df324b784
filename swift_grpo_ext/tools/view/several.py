"""Several runs side by side: their curves, the settings in which they differ, and two of them
paired sample by sample and prompt by prompt, as `diff` and `compare` do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from swift_grpo_ext.tools.diff import diff, differing_settings, read_args
from swift_grpo_ext.tools.paired import compare, read_pair
from swift_grpo_ext.tools.updates import read_steps
from swift_grpo_ext.tools.view import overview
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.runs import describe

LAST_STEPS = 20
"""Steps at the end of a run over which its reward is averaged."""

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
    for name, run in zip(names_of(runs), runs, strict=True):
        records, logs = run.diversity.read(), read_steps(run.run_dir)
        panels = overview.make_panels(run.snapshot, records, logs)
        panels_of_runs[name] = panels
        rewards = panels.get("reward", {}).get("reward", [])
        last = [value for step, value in rewards if step > rewards[-1][0] - LAST_STEPS]
        steps = [step for curves in panels.values() for p in curves.values() for step, _ in p]
        rows.append(
            {
                "name": name,
                "steps": max(steps, default=0),
                "samples": run.snapshot.table.num_rows,
                "last_reward": float(np.mean(last)) if last else None,
                "verdict": overview.overall_verdict(records),
            }
        )
    return {
        "rows": rows,
        "settings": differing_settings(*(read_args(run.run_dir) for run in runs)),
        "charts": overview.make_charts(overview.compare_curves(panels_of_runs)),
        "is_live": True,
    }


def pair_values(runs: Sequence[RunView], numbers: tuple[int, int]) -> dict[str, Any]:
    """Return the values of `pair.html`: where two runs part, and what the prompts gained that both
    met; `problems` say what could not be compared. Raises IndexError where there is no such run."""
    one, other = (runs[number] for number in numbers)
    names = [names_of(runs)[number] for number in numbers]
    values: dict[str, Any] = {"names": names, "numbers": numbers, "problems": []}
    try:
        found = diff(one.run_dir, other.run_dir)
    except (OSError, ValueError) as e:
        values["problems"].append(str(e))
    else:
        values["diff"] = found
        decoders = one.decode, other.decode
        values["parted"] = found.difference and found.difference.describe(decoders=decoders)
    try:
        pair = read_pair((one.run_dir, other.run_dir))
        seeds = dict.fromkeys(str(read_args(run.run_dir).get("seed")) for run in (one, other))
        values["comparison"] = compare({" and ".join(seeds): pair})
    except (OSError, ValueError) as e:
        values["problems"].append(str(e))
    else:
        values["lengths"] = pair.describe_lengths()
        values["prompts"] = _prompts_apart((one, other), pair.means)
    return values


def _prompts_apart(
    pair: Sequence[RunView], means: Sequence[pd.Series[float]]
) -> list[dict[str, Any]]:
    """Return the prompts whose mean rewards differ most, each with its newest group in each run."""
    both = pd.concat(means, axis=1, keys=(0, 1)).dropna()
    gains = (both[1] - both[0]).sort_values(key=abs, ascending=False, kind="stable")
    prompts = []
    for fingerprint, gain in gains.head(MAX_PROMPTS).items():
        groups = []
        for run in pair:
            at = pc.index(run.snapshot.table["fingerprint"], fingerprint).as_py()
            rows = run.snapshot.table.slice(at, 1).to_pylist() if at >= 0 else []
            groups.append(describe(run.snapshot, rows[0]) if rows else None)
        known = next(filter(None, groups), None)
        if known and gain:
            prompts.append({**known, "means": both.loc[fingerprint].to_list(), "groups": groups})
    return prompts
