"""`swift-grpo-ext compare`: how much better candidate runs score than baselines, prompt by prompt.

Runs with one `--seed` meet the same prompts with the same noise. What two such runs share cancels
in the difference of each prompt's mean rewards, so that the interval is narrower than that of two
means that are compared unpaired. Of runs of different lengths the steps that both have are
compared: rewards rise as a run goes on.

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
from typing import NamedTuple

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

    steps: dict[str, tuple[int, int]]
    """The first and the last step that were compared of each pair, by seed."""

    num_steps: dict[str, tuple[int, int]]
    """How many steps each run of a pair has, by seed."""


class Pair(NamedTuple):
    """Two runs side by side."""

    means: tuple[pd.Series[float], pd.Series[float]]
    """Each run's mean rewards by the prompts' hashes."""

    steps: range
    """From the first step that both runs have to the last one, which are compared."""

    num_steps: tuple[int, int]
    """How many each run has."""

    def describe_lengths(self, which: str = "") -> str:
        """Return a sentence where the runs are of different lengths, else nothing."""
        one, other = self.num_steps
        if one == other:
            return ""
        return (
            f"Runs{which} are of different lengths ({one} and {other} steps): steps "
            f"{self.steps[0]} to {self.steps[-1]} are compared."
        )


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
        is_single = all(len(set(side_seeds)) == len(side_seeds) for side_seeds in seeds)
        if not is_single or set(seeds[0]) != set(seeds[1]):
            raise ValueError(
                f"--baseline has the seeds {seeds[0]} and --candidate {seeds[1]}; expected each "
                "seed once on both sides. Give runs that were started with equal --seed."
            )
        candidates = [candidates[seeds[1].index(seed)] for seed in seeds[0]]
    return dict(zip(seeds[0], zip(baselines, candidates, strict=True), strict=True))


def read_scores(
    run_dir: Path, *, phase: Phase, steps: range | None, reward: str | None
) -> pd.DataFrame:
    """Return a run's samples with their `step`, `fingerprint` and `reward`.

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
        among = f" in the steps {steps[0]} to {steps[-1]}" if steps else ""
        raise ValueError(f"{run_dir} has no scored {phase} round{among}.")
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
    return scores.merge(prompts.drop_duplicates(SAMPLE), on=SAMPLE).dropna(subset="reward")


def read_pair(
    runs: tuple[Path, Path],
    *,
    phase: Phase = "train",
    steps: range | None = None,
    reward: str | None = None,
) -> Pair:
    """Read two runs in the steps that both have; arguments and errors are those of `read_scores`,
    and ValueError where there is no such step."""
    scores = [read_scores(run, phase=phase, steps=steps, reward=reward) for run in runs]
    spans = [range(s["step"].min(), s["step"].max() + 1) for s in scores]
    common = range(max(span.start for span in spans), min(span.stop for span in spans))
    if not common:
        had = " and ".join(
            f"{run} has the steps {s[0]} to {s[-1]}" for run, s in zip(runs, spans, strict=True)
        )
        raise ValueError(f"{had}: expected some in common.")
    baseline, candidate = (
        s[s["step"].isin(common)].groupby("fingerprint")["reward"].mean().astype(float)
        for s in scores
    )
    return Pair((baseline, candidate), common, (len(spans[0]), len(spans[1])))


def compare(pairs: Mapping[str, Pair]) -> Comparison:
    """Compare pairs of runs by their mean rewards of each prompt.

    Args:
        pairs: by seed.

    Raises:
        ValueError: a pair has fewer than two prompts in common.
    """
    num_alone = num_prompts = 0
    means = []
    for seed, pair in pairs.items():
        both = pd.concat(pair.means, axis=1)
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
        steps={seed: (pair.steps[0], pair.steps[-1]) for seed, pair in pairs.items()},
        num_steps={seed: pair.num_steps for seed, pair in pairs.items()},
    )


def run(options: argparse.Namespace) -> int:
    """Print the comparison as a table or as JSON."""
    sides = [
        [run for folder in folders for run in find_runs(folder)]
        for folders in (options.baseline, options.candidate)
    ]
    chosen = {"phase": options.phase, "steps": options.steps, "reward": options.reward}
    pairs = {seed: read_pair(runs, **chosen) for seed, runs in pair_by_seed(*sides).items()}
    result = compare(pairs)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    low, high = result.interval
    print(f"{result.num_pairs} pair(s) of runs, {result.num_prompts:,} prompts")
    for seed, pair in pairs.items():
        if told := pair.describe_lengths(f" of seed {seed}" if len(pairs) > 1 else ""):
            print(told)
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
