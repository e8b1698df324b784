"""`swift-grpo-ext compare`: how much better candidate runs score than baselines, prompt by prompt.

Runs with one `--seed` meet the same prompts, and a sample's noise follows from its place. What two
such runs share cancels in the difference of each prompt's mean rewards, so that its interval is
narrower than that of two means that are held against each other unpaired.

Intervals come from a bootstrap in two stages: over pairs of runs, then over the prompts of each
(Davison and Hinkley 1997, section 3.8). Unpaired, each side is drawn for itself. One pair of runs
says nothing about other seeds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_grpo_ext.record.reader import RoundName, index_rewards, index_samples
from swift_grpo_ext.tools.view.queries import read_query

FEW_PAIRS = 5
"""Below as many, a bootstrap over runs is too narrow."""

_BLOCK = 500
"""Resamples at a time: bounds memory."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Side:
    """What a run's prompts scored."""

    seed: Any
    rewards: Mapping[str, float]
    """Prompt's fingerprint -> mean reward of its samples."""

    places: frozenset[tuple[RoundName, int, str]]
    """Round, group and fingerprint."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `--json` prints. Intervals hold 95%."""

    num_pairs: int
    num_prompts: int
    """That both runs of a pair met, summed over pairs."""

    num_alone: int
    """Prompts that one run of a pair did not meet; they are left out."""

    shared_places: float
    """Share of the baseline's groups that the candidate met at the same place: these share their
    noise where `--temperature` and the like are equal, and `--num_generations` in their first
    samples."""

    baseline: float
    candidate: float
    """Mean rewards, over pairs and their prompts."""

    difference: float
    paired: tuple[float, float]
    unpaired: tuple[float, float]
    differences: Mapping[str, float]
    """By seed."""

    @property
    def narrowing(self) -> float:
        """Width of the unpaired interval as a multiple of the paired one's."""
        width = self.paired[1] - self.paired[0]
        return (self.unpaired[1] - self.unpaired[0]) / width if width else math.nan


def read_side(
    run_dir: str | Path, *, phase: str, steps: tuple[float, float], reward: str | None
) -> Side:
    """A run's rewards by prompt.

    Args:
        phase: `train` or `eval`.
        steps: first and last step, both included.
        reward: a reward function's name; None: the total.

    Raises:
        ValueError: there is no scored round, or no such function.
    """
    samples = index_samples(run_dir)
    scores = index_rewards(samples, run_dir)
    rounds = [
        name
        for name in scores.rounds
        if name.phase == phase and steps[0] <= name.step <= steps[1] and name in samples.rounds
    ]
    values: defaultdict[str, list[float]] = defaultdict(list)
    places: set[tuple[RoundName, int, str]] = set()
    tables = zip(
        rounds,
        samples.read_rounds(rounds, ["group", "fingerprint"]),
        scores.read_rounds(rounds, ["group", "reward", "rewards"]),
        strict=True,
    )
    for name, drawn, scored in tables:
        groups, prompts = drawn["group"].to_pylist(), drawn["fingerprint"].to_pylist()
        prompt_of = dict(zip(groups, prompts, strict=True))
        places.update((name, group, prompt) for group, prompt in prompt_of.items())
        for row in scored.to_pylist():
            value = row["reward"] if reward is None else _named(row["rewards"], reward, run_dir)
            if value is not None and row["group"] in prompt_of:
                values[prompt_of[row["group"]]].append(value)
    if not values:
        raise ValueError(
            f"--phase {phase}, --steps {steps[0]:g}:{steps[1]:g}: {run_dir} has no scored round of "
            "these. Look with: swift-grpo-ext view RUN."
        )
    return Side(
        seed=_seed(Path(run_dir)),
        rewards={prompt: float(np.mean(found)) for prompt, found in values.items()},
        places=frozenset(places),
    )


def _named(rewards: Sequence[tuple[str, float | None]], name: str, run_dir: str | Path) -> Any:
    by_name = dict(rewards)
    if name not in by_name:
        raise ValueError(f"--reward {name!r}: {run_dir} has {', '.join(by_name)}.")
    return by_name[name]


def _seed(run_dir: Path) -> Any:
    try:
        return json.loads((run_dir / "args.json").read_text(encoding="utf-8"))["seed"]
    except (OSError, ValueError, KeyError):
        return None


def pair_by_seed(baselines: Sequence[Side], candidates: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Pairs of runs with one `--seed`; one run on each side is a pair whatever its seed.

    Raises:
        ValueError: a seed is on one side only, or twice.
    """
    if len(baselines) == len(candidates) == 1:
        return [(baselines[0], candidates[0])]
    seeds = [[side.seed for side in sides] for sides in (baselines, candidates)]
    if any(len(set(found)) < len(found) for found in seeds) or set(seeds[0]) != set(seeds[1]):
        raise ValueError(
            f"--baseline has the seeds {seeds[0]} and --candidate {seeds[1]}; expected each seed "
            "once on both sides. Give runs that were started with equal --seed."
        )
    by_seed = {side.seed: side for side in candidates}
    return [(side, by_seed[side.seed]) for side in baselines]


def compare(
    pairs: Sequence[tuple[Side, Side]], *, resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Hold pairs of runs against each other.

    Raises:
        ValueError: a pair has fewer than two prompts in common.
    """
    random = np.random.default_rng(seed)
    values = []
    num_alone = 0
    for one, other in pairs:
        common = sorted(one.rewards.keys() & other.rewards.keys())
        if len(common) < 2:
            raise ValueError(
                f"The runs of seed {one.seed} have {len(common)} prompts in common, expected 2 or "
                "more: other data, or the same elsewhere (a prompt is known by its row, paths of "
                "images included). Give runs on one data set in one folder."
            )
        num_alone += len(one.rewards.keys() ^ other.rewards.keys())
        values.append(np.array([[s.rewards[prompt] for prompt in common] for s in (one, other)]))
    paired = [_means(both[1] - both[0], resamples, random) for both in values]
    a, b = ([_means(both[i], resamples, random) for both in values] for i in (0, 1))
    means = np.array([both.mean(axis=1) for both in values])
    places = [(len(one.places & other.places), len(one.places)) for one, other in pairs]
    return Comparison(
        num_pairs=len(pairs),
        num_prompts=sum(both.shape[1] for both in values),
        num_alone=num_alone,
        shared_places=sum(n for n, _ in places) / sum(n for _, n in places),
        baseline=float(means[:, 0].mean()),
        candidate=float(means[:, 1].mean()),
        difference=float((means[:, 1] - means[:, 0]).mean()),
        paired=_interval(_over_runs(paired, random)),
        unpaired=_interval(_over_runs(b, random) - _over_runs(a, random)),
        differences={
            str(one.seed): float(m[1] - m[0]) for (one, _), m in zip(pairs, means, strict=True)
        },
    )


def _means(values: Floats, resamples: int, random: np.random.Generator) -> Floats:
    """Means of `resamples` draws of as many prompts with replacement."""
    size = len(values)
    blocks = range(0, resamples, _BLOCK)
    drawn = (random.integers(size, size=(min(_BLOCK, resamples - i), size)) for i in blocks)
    return np.concatenate([values[index].mean(axis=1) for index in drawn])


def _over_runs(means: Sequence[Floats], random: np.random.Generator) -> Floats:
    """Means of as many runs, drawn with replacement; of each, one draw of its prompts."""
    table = np.stack(means)
    runs, resamples = table.shape
    which = random.integers(runs, size=(resamples, runs))
    draw = random.integers(resamples, size=(resamples, runs))
    return table[which, draw].mean(axis=1)


def _interval(draws: Floats) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


# --- the command ---


def run(options: Any) -> int:
    """Print a comparison."""
    steps = read_query({"steps": options.steps}).steps
    how = {"phase": options.phase, "steps": steps, "reward": options.reward}
    sides = [[read_side(d, **how) for d in dirs] for dirs in (options.baseline, options.candidate)]
    result = compare(pair_by_seed(*sides), resamples=options.resamples)
    if options.json:
        print(json.dumps({**asdict(result), "narrowing": result.narrowing}, indent=2))
    else:
        print("\n".join(describe(result)))
    return 0


def describe(result: Comparison) -> list[str]:
    """Lines for people."""
    pairs = "1 pair of runs" if result.num_pairs == 1 else f"{result.num_pairs} pairs of runs"
    lines = [
        f"{pairs}, {result.num_prompts:,} prompts, {result.shared_places:.0%} of them at the same "
        f"place (these share their noise)",
        f"  baseline    {result.baseline:8.4f}",
        f"  candidate   {result.candidate:8.4f}",
        f"  difference  {result.difference:+8.4f}",
        f"  paired      [{result.paired[0]:+.4f}, {result.paired[1]:+.4f}] (95%)",
        f"  unpaired    [{result.unpaired[0]:+.4f}, {result.unpaired[1]:+.4f}], "
        f"{result.narrowing:.1f} times as wide",
    ]
    if result.num_pairs > 1:
        found = ", ".join(f"{seed}: {value:+.4f}" for seed, value in result.differences.items())
        lines.append(f"  by seed     {found}")
    if result.num_alone:
        lines.append(f"{result.num_alone:,} prompts that only one run of a pair met are left out.")
    if result.num_pairs == 1:
        lines.append("This is about these two runs: other seeds may differ by more.")
    elif result.num_pairs < FEW_PAIRS:
        lines.append(f"Fewer than {FEW_PAIRS} pairs: the intervals are too narrow.")
    return lines
