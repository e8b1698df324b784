"""Several runs side by side: how each is, the settings in which they differ, and two of them paired
sample by sample and prompt by prompt, as `diff` and `compare` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swift_grpo_ext.tools.diff import compare, diff, differing_settings, read_args, read_pair
from swift_grpo_ext.tools.view.overview import make_panels, mean_of_last, overall_verdict
from swift_grpo_ext.tools.view.runs import NEWEST, NotFoundError, Run, described

MAX_PROMPTS = 20
"""Prompts that are shown of two runs: those whose rewards differ most."""


def runs_values(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the values of `runs.html`: how each run is, and the settings that differ."""
    rows = []
    for run in runs:
        rewards = make_panels(run).get("reward", {}).get("reward", [])
        rows.append(
            {
                "name": str(run.run_dir),
                "step": rewards[-1][0] if rewards else run.log.step,
                "samples": run.facts.num_rows,
                "reward": mean_of_last(rewards),
                "verdict": overall_verdict(run.facts.diversity),
                "log": run.log,
            }
        )
    args = [read_args(run.run_dir) for run in runs]
    differing = differing_settings(*args).items()
    # A setting that a run lacks is one of versions, and no choice.
    settings = {name: v for name, v in differing if all(name in own for own in args)}
    return {"rows": rows, "settings": settings}


def pair_values(runs: Sequence[Run], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of `pair.html` of the first run and the one with the index `b`: where they
    part, and what the prompts gained that both met; `problem` says what could not be compared.
    Raises NotFoundError where there is no such run."""
    index = query.get("b", "")
    if not index.isdecimal() or int(index) >= len(runs):
        raise NotFoundError(f"b={index}: expected the number of a run")
    one, other = runs[0], runs[int(index)]
    names = [str(run.run_dir) for run in (one, other)]
    values: dict[str, Any] = {"names": names, "indices": ("0", index), "problem": ""}
    try:
        values["diff"] = found = diff(one.record, other.record)
        if found.difference:
            values["parted"] = found.difference.describe(decoders=(one.decode, other.decode))
        pair = read_pair(one.record, other.record)
        seeds = dict.fromkeys(str(read_args(run.run_dir).get("seed")) for run in (one, other))
        values |= {"pair": pair, "comparison": compare({" and ".join(seeds): pair})}
    except (OSError, ValueError) as e:
        values["problem"] = str(e)
    else:
        values["prompts"] = _prompts_apart((one, other), pair.means)
    return values


def _prompts_apart(
    runs: tuple[Run, Run], means: Mapping[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return the prompts whose mean rewards differ most, each with its newest sample in each run.

    Args:
        means: each run's mean reward by the prompts' hashes.
    """
    apart = [(prompt, pair) for prompt, pair in means.items() if pair[0] != pair[1]]
    apart.sort(key=lambda each: -abs(each[1][1] - each[1][0]))
    prompts = []
    for fingerprint, pair in apart[:MAX_PROMPTS]:
        query = f"select * from scored where fingerprint = ? order by {NEWEST} limit 1"
        found = [run.record.rows(query, [fingerprint]) for run in runs]
        if all(found):  # a bounded record may have lost it since
            prompts.append({"means": pair, "samples": [described(rows[0]) for rows in found]})
    return prompts
