"""A prediction interval (the band) for one more run of the demo, from the published runs.

Runs of one model and data set differ by their seed: the order of prompts, and every sample drawn.
If a figure is normally distributed over seeds, and n runs gave the mean m and the standard
deviation s (divided by n - 1), then one more run lies, with probability 1 - alpha, within

    m +- t(1 - alpha / 2; n - 1) * s * sqrt(1 + 1 / n)

t being the quantile of Student's distribution: the prediction interval of a future observation
(G. J. Hahn, Additional factors for calculating prediction intervals for samples from a normal
distribution, JASA 65 (332), 1970, doi 10.2307/2284349). The square root holds both spreads, that of
the new run and that of m. Three figures are looked at; each interval takes alpha = 0.05 / 3
(Bonferroni), so that all three hold with a probability of 95% or more: of twenty sound runs, about
one is outside with some figure.

The band is that of one start model, and so of one kind of processor: sums round in another order on
others, the warm start ends elsewhere, and so does what is trained on. `start_differs` says so. What
holds on any machine is the gain in reward (`missing_gain`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from records import NUM_ENDS, Record
from scipy.stats import t

MISS = 0.05
"""Probability, at most, that a sound run is outside in one or more figures."""

PROMISED_GAIN = 0.08
"""Mean reward that every run gains, at least, from its first 20 steps to its last 20: the published
seeds of 80 steps put one more run above it with a probability of 99%. Without learning the reward
of 20 steps moves by about 0.03."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number that a run is judged by."""

    label: str
    of: Callable[[Record], float]
    highest: float
    """Its largest possible value; the smallest is 0."""

    percent: bool = False

    def show(self, value: float) -> str:
        return f"{value:.1%}" if self.percent else f"{value:.3f}"


FIGURES = (
    Figure(
        label="greedy accuracy", of=lambda r: r.after["greedy_accuracy"], highest=1.0, percent=True
    ),
    Figure(
        label="sampled accuracy",
        of=lambda r: r.after["sampled_accuracy"],
        highest=1.0,
        percent=True,
    ),
    Figure(
        label=f"mean reward of the last {NUM_ENDS} steps",
        of=lambda r: r.last_reward,
        highest=1.2,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Rounding of the last decimal of a stored value counts as inside."""
        return self.low - 1e-9 <= value <= self.high + 1e-9


def prediction_interval(values: Sequence[float], miss: float) -> Interval:
    """Where one more value lies, but for a probability of `miss`; see the module's docstring.

    Raises ValueError for fewer than two values.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"a band needs two runs or more, there are {n}; make more seeds")
    half = float(t.ppf(1 - miss / 2, n - 1)) * stdev(values) * sqrt(1 + 1 / n)
    return Interval(low=fmean(values) - half, high=fmean(values) + half)


def band_of(figure: Figure, published: Sequence[Record]) -> Interval:
    """The band of one of `FIGURES`, within the values that are possible."""
    band = prediction_interval([figure.of(r) for r in published], MISS / len(FIGURES))
    return Interval(low=max(0.0, band.low), high=min(figure.highest, band.high))


def outside(record: Record, published: Sequence[Record]) -> list[str]:
    """What lies outside its band, a line each; empty for a run within all."""
    lines = []
    for figure in FIGURES:
        band, value = band_of(figure, published), figure.of(record)
        if not band.holds(value):
            where = "below" if value < band.low else "above"
            lines.append(
                f"{figure.label} {figure.show(value)} is {where} the band, "
                f"{figure.show(band.low)} to {figure.show(band.high)}"
            )
    return lines


def start_differs(record: Record, published: Sequence[Record]) -> str:
    """How the start model differs from the published one; "" where it does not."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.1%}, not {published[0].before[name]:.1%}"
        for name, value in record.before.items()
        if value != published[0].before[name]
    )


def gains(record: Record) -> str:
    """Return what a run gained, in words."""
    first, last = record.first_reward, record.last_reward
    text = (
        f"mean reward {first:.2f} in the first {NUM_ENDS} steps, {last:.2f} in the last {NUM_ENDS}"
    )
    for name in ("greedy_accuracy", "sampled_accuracy"):
        text += f"; {name.replace('_', ' ')} {record.before[name]:.1%} to {record.after[name]:.1%}"
    return text


def missing_gain(record: Record) -> bool:
    """Return whether the reward gained less than is promised."""
    return record.gain < PROMISED_GAIN
