"""`swift-grpo-ext compare`: how much better candidate runs score than baselines, prompt by prompt.

Runs with one `--seed` meet the same prompts with the same noise. What two such runs share cancels
in the difference of each prompt's mean rewards, so that the paired interval is narrower than that
of two means that are compared unpaired.

Intervals hold 95% of a bootstrap (`scipy.stats.bootstrap`). Several pairs of runs are resampled as
whole pairs, for prompts within a run are not independent. One pair is resampled by its prompts, and
says nothing about other seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import bootstrap

from swift_grpo_ext.record.reader import read_rewards, read_samples
from swift_grpo_ext.sampling.seeding import Phase

RESAMPLES = 10_000
FEW_PAIRS = 5
"""Below as many pairs, a bootstrap over pairs is too narrow."""

SAMPLE = ["phase", "step", "number", "group", "index"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The mean reward of each prompt of a run."""

    seed: int | None
    """The run's `--seed`; None where `args.json` does not tell."""

    by_prompt: pd.Series[float]
    """Mean rewards, indexed by the prompt's hash."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result, as `--json` prints it."""

    num_pairs: int
    num_prompts: int
    """The prompts that both runs of a pair met, summed over pairs."""

    num_alone: int
    """The prompts that only one run of a pair met; they are left out."""

    baseline: float
    candidate: float
    """Mean rewards, over pairs and their prompts."""

    difference: float
    paired: tuple[float, float]
    unpaired: tuple[float, float]
    differences: dict[str, float]
    """The difference of each pair, by seed."""


def read_scores(
    run_dir: str | Path, *, phase: Phase, steps: range | None, reward: str | None
) -> Scores:
    """Read a run's mean rewards by prompt.

    Args:
        steps: count these rounds only; None for all.
        reward: a reward function's name; None for the total.

    Raises:
        FileNotFoundError: the run has no record.
        ValueError: there is no scored round, or no such function.
    """
    columns = [*SAMPLE, "fingerprint"]
    prompts = read_samples(run_dir, columns=columns, phase=phase, steps=steps).to_pandas()
    columns = [*SAMPLE, "reward", "rewards"]
    scores = read_rewards(run_dir, columns=columns, phase=phase, steps=steps).to_pandas()
    if not len(scores):
        raise ValueError(f"{run_dir} has no scored {phase} round in the steps {steps or 'given'}.")
    if reward is not None:
        functions = sorted({name for row in scores["rewards"] for name, _ in row})
        if reward not in functions:
            raise ValueError(f"--reward {reward!r}: {run_dir} has {', '.join(functions)}.")
        scores["reward"] = [dict(row).get(reward) for row in scores["rewards"]]
    # Each turn of a conversation is a row, and all of them share one score.
    merged = scores.merge(prompts.drop_duplicates(SAMPLE), on=SAMPLE).dropna(subset="reward")
    try:
        settings = json.loads((Path(run_dir) / "args.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    means = merged.groupby("fingerprint")["reward"].mean()
    return Scores(seed=settings.get("seed"), by_prompt=means.astype(float))


def pair_by_seed(
    baselines: Sequence[Scores], candidates: Sequence[Scores]
) -> list[tuple[Scores, Scores]]:
    """Pair the runs that have one `--seed`; one run on each side is a pair whatever its seed.

    Raises:
        ValueError: a seed is on one side only, or twice.
    """
    if len(baselines) == len(candidates) == 1:
        return [(baselines[0], candidates[0])]
    seeds = [[run.seed for run in runs] for runs in (baselines, candidates)]
    if any(len(set(of_side)) < len(of_side) for of_side in seeds) or set(seeds[0]) != set(seeds[1]):
        raise ValueError(
            f"--baseline has the seeds {seeds[0]} and --candidate {seeds[1]}; expected each seed "
            "once on both sides. Give runs that were started with equal --seed."
        )
    by_seed = {run.seed: run for run in candidates}
    return [(run, by_seed[run.seed]) for run in baselines]


def compare(pairs: Sequence[tuple[Scores, Scores]]) -> Comparison:
    """Compare pairs of runs.

    Raises:
        ValueError: a pair has fewer than two prompts in common.
    """
    num_alone = num_prompts = 0
    means = []
    for one, other in pairs:
        both = pd.concat([one.by_prompt, other.by_prompt], axis=1)
        common = both.dropna()
        if len(common) < 2:
            raise ValueError(
                f"The runs of seed {one.seed} have {len(common)} prompts in common, expected 2 or "
                "more: other data, or the same elsewhere (a prompt is known by its row, paths of "
                "images included). Give runs on one data set in one folder."
            )
        num_alone += len(both) - len(common)
        num_prompts += len(common)
        means.append(common.mean().to_numpy())
    baseline, candidate = np.array(means).T
    units = (baseline, candidate) if len(pairs) > 1 else tuple(common.to_numpy().T)
    return Comparison(
        num_pairs=len(pairs),
        num_prompts=num_prompts,
        num_alone=num_alone,
        baseline=float(baseline.mean()),
        candidate=float(candidate.mean()),
        difference=float((candidate - baseline).mean()),
        paired=_interval(*units, paired=True),
        unpaired=_interval(*units, paired=False),
        differences={
            str(one.seed): float(gain)
            for (one, _), gain in zip(pairs, candidate - baseline, strict=True)
        },
    )


def _interval(baseline: Floats, candidate: Floats, *, paired: bool) -> tuple[float, float]:
    """Return the 95% interval of the difference of means."""

    def difference(one: Floats, other: Floats, axis: int) -> Floats:
        return other.mean(axis=axis) - one.mean(axis=axis)

    result = bootstrap(
        (baseline, candidate),
        difference,
        paired=paired,
        n_resamples=RESAMPLES,
        batch=500,  # bounds memory with many prompts
        method="percentile",  # BCa is not defined where all differences are equal
        random_state=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return float(low), float(high)


def run(options: argparse.Namespace) -> int:
    """Print the comparison as a table or as JSON."""
    baselines, candidates = (
        [
            read_scores(folder, phase=options.phase, steps=options.steps, reward=options.reward)
            for folder in folders
        ]
        for folders in (options.baseline, options.candidate)
    )
    result = compare(pair_by_seed(baselines, candidates))
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    print(f"{result.num_pairs} pair(s) of runs, {result.num_prompts:,} prompts")
    print(f"  baseline    {result.baseline:8.4f}")
    print(f"  candidate   {result.candidate:8.4f}")
    print(f"  difference  {result.difference:+8.4f}")
    print(f"  paired      [{result.paired[0]:+.4f}, {result.paired[1]:+.4f}] (95%)")
    print(f"  unpaired    [{result.unpaired[0]:+.4f}, {result.unpaired[1]:+.4f}]")
    if result.num_alone:
        print(f"{result.num_alone:,} prompts that only one run of a pair met are left out.")
    if result.num_pairs == 1:
        print("This is about these two runs: other seeds may differ by more.")
        return 0
    by_seed = ", ".join(f"{seed}: {gain:+.4f}" for seed, gain in result.differences.items())
    print(f"  by seed     {by_seed}")
    if result.num_pairs < FEW_PAIRS:
        print(f"Fewer than {FEW_PAIRS} pairs: the intervals are too narrow.")
    return 0
