"""`swift-grpo-ext compare`: how much better candidate runs score than baselines, prompt by prompt.

Runs with one `--seed` meet the same prompts with the same noise. What two such runs share cancels
in the difference of each prompt's mean rewards, so that the interval is narrower than that of two
means that are compared unpaired.

The 95% interval of the mean difference is Student's t. Several pairs of runs count as one value
each, for prompts within a run are not independent. Of one pair the prompts count, which says
nothing about other seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from swift_grpo_ext.record.reader import read_rewards, read_samples
from swift_grpo_ext.sampling.seeding import Phase
from swift_grpo_ext.tools.diff import read_args
from swift_grpo_ext.tools.runs import find_runs

SAMPLE = ["phase", "step", "number", "group", "index"]
TURNS = "turns"
"""In the place of a reward: how many turns a conversation has."""


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
    interval: tuple[float, float]
    """Of the difference, at 95%."""

    differences: dict[str, float]
    """The difference of each pair, by seed."""


def pair_by_seed(
    baselines: Sequence[Path], candidates: Sequence[Path]
) -> dict[str, tuple[Path, Path]]:
    """Return the folders of runs with one `--seed`, by it; one run on each side is a pair whatever
    its seed.

    Raises:
        ValueError: a seed is on one side only, or twice.
    """
    seeds = [
        [str(read_args(folder).get("seed", "unknown")) for folder in side]
        for side in (baselines, candidates)
    ]
    if len(baselines) > 1 or len(candidates) > 1:
        is_single = all(len(set(of_side)) == len(of_side) for of_side in seeds)
        if not is_single or set(seeds[0]) != set(seeds[1]):
            raise ValueError(
                f"--baseline has the seeds {seeds[0]} and --candidate {seeds[1]}; expected each "
                "seed once on both sides. Give runs that were started with equal --seed."
            )
        candidates = [candidates[seeds[1].index(seed)] for seed in seeds[0]]
    return dict(zip(seeds[0], zip(baselines, candidates, strict=True), strict=True))


def read_means(
    run_dir: Path, *, phase: Phase, steps: range | None, reward: str | None
) -> pd.Series[float]:
    """Return a run's mean rewards by the prompts' hashes.

    Args:
        steps: count these rounds only; None for all.
        reward: a reward function's name, or `turns`; None for the total.

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
        if reward in functions:
            scores["reward"] = [dict(row).get(reward) for row in scores["rewards"]]
        elif reward == TURNS:
            turns = prompts.groupby(SAMPLE).size().rename(TURNS).reset_index()
            scores["reward"] = scores[SAMPLE].merge(turns, on=SAMPLE, how="left")[TURNS]
        else:
            known = ", ".join([*functions, TURNS])
            raise ValueError(f"--reward {reward!r}: {run_dir} has {known}.")
    # Each turn of a conversation is a row, and all of them share one score.
    merged = scores.merge(prompts.drop_duplicates(SAMPLE), on=SAMPLE).dropna(subset="reward")
    return merged.groupby("fingerprint")["reward"].mean().astype(float)


def compare(pairs: Mapping[str, tuple[pd.Series[float], pd.Series[float]]]) -> Comparison:
    """Compare pairs of runs by their mean rewards of each prompt.

    Raises:
        ValueError: a pair has fewer than two prompts in common.
    """
    num_alone = num_prompts = 0
    means = []
    for seed, pair in pairs.items():
        both = pd.concat(pair, axis=1)
        common = both.dropna()
        if len(common) < 2:
            raise ValueError(
                f"The runs of seed {seed} have {len(common)} prompts in common, expected 2 or "
                "more: other data, or the same elsewhere (a prompt is known by its row, paths of "
                "images included). Give runs on one data set in one folder."
            )
        num_alone += len(both) - len(common)
        num_prompts += len(common)
        means.append(common.mean().to_numpy())
    baseline, candidate = np.array(means).T
    gains = candidate - baseline
    units = gains if len(pairs) > 1 else np.diff(common.to_numpy()).ravel()
    margin = float(stats.t.ppf(0.975, len(units) - 1) * stats.sem(units))
    difference = float(gains.mean())
    return Comparison(
        num_pairs=len(pairs),
        num_prompts=num_prompts,
        num_alone=num_alone,
        baseline=float(baseline.mean()),
        candidate=float(candidate.mean()),
        difference=difference,
        interval=(difference - margin, difference + margin),
        differences=dict(zip(pairs, gains.tolist(), strict=True)),
    )


def run(options: argparse.Namespace) -> int:
    """Print the comparison as a table or as JSON."""
    sides = [
        [run for folder in folders for run in find_runs(folder)]
        for folders in (options.baseline, options.candidate)
    ]
    pairs = {
        seed: tuple(
            read_means(folder, phase=options.phase, steps=options.steps, reward=options.reward)
            for folder in folders
        )
        for seed, folders in pair_by_seed(*sides).items()
    }
    result = compare(pairs)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    low, high = result.interval
    print(f"{result.num_pairs} pair(s) of runs, {result.num_prompts:,} prompts")
    print(f"  baseline    {result.baseline:8.4f}")
    print(f"  candidate   {result.candidate:8.4f}")
    print(f"  difference  {result.difference:+8.4f}  [{low:+.4f}, {high:+.4f}] (95%)")
    if result.num_alone:
        print(f"{result.num_alone:,} prompts that only one run of a pair met are left out.")
    if result.num_pairs == 1:
        print("This is about these two runs: other seeds may differ by more.")
    else:
        by_seed = ", ".join(f"{seed}: {gain:+.4f}" for seed, gain in result.differences.items())
        print(f"  by seed     {by_seed}")
    return 0
