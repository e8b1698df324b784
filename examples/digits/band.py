"""Compute prediction intervals (the band) for another run of the demo, from the published runs.

The seed decides the order of prompts and every sample, so runs differ. Assume that a figure is
normally distributed over seeds, and that n runs have the mean m and the standard deviation s (with
n - 1 in the denominator). Then another run lies, with probability 1 - alpha, within

    m +- t(1 - alpha / 2; n - 1) * s * sqrt(1 + 1 / n)

where t is the quantile of Student's distribution. This is the prediction interval of a future
observation (G. J. Hahn, Additional factors for calculating prediction intervals for samples from a
normal distribution, JASA 65 (332), 1970, doi 10.2307/2284349). The square root combines the
variance of the new run and that of m. Each of the three figures gets alpha = 0.05 / 3 (Bonferroni),
so about one of twenty sound runs is outside in some figure.

The band holds for one start model, and so for one kind of processor: other processors sum in
another order, and the warm start ends with other weights (`start_difference`). The gain in reward
holds on any machine (`has_too_little_gain`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from records import NUM_ENDS, Record
from scipy.stats import t

MISS = 0.05
"""Maximum probability that a sound run is outside the band in any figure."""

PROMISED_GAIN = 0.08
"""Minimum increase of the mean reward from the first 20 steps to the last 20. By the published runs
of 80 steps, another run gains more with a probability of 99%. Without learning, the mean reward of
20 steps varies by about 0.03."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that runs are compared by."""

    label: str
    of: Callable[[Record], float]
    highest: float  # largest possible value; the smallest is 0
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
        label=f"mean reward of the last {NUM_ENDS} steps", of=lambda r: r.last_reward, highest=1.2
    ),
)


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether the interval contains a value, with tolerance for rounding."""
        return self.low - 1e-9 <= value <= self.high + 1e-9


def prediction_interval(values: Sequence[float], miss: float) -> Interval:
    """Return the interval that another value misses with probability `miss`.

    Raises:
        ValueError: there are fewer than two values.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"a band needs at least two runs, not {n}. Run more seeds")
    half = float(t.ppf(1 - miss / 2, n - 1)) * stdev(values) * sqrt(1 + 1 / n)
    return Interval(low=fmean(values) - half, high=fmean(values) + half)


def band_of(figure: Figure, published: Sequence[Record]) -> Interval:
    """Return the prediction interval of one of `FIGURES`, clipped to possible values."""
    band = prediction_interval([figure.of(r) for r in published], MISS / len(FIGURES))
    return Interval(low=max(0.0, band.low), high=min(figure.highest, band.high))


def outside(record: Record, published: Sequence[Record]) -> list[str]:
    """Return a description of each figure that is outside its band."""
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


def start_difference(record: Record, published: Sequence[Record]) -> str:
    """Describe how the start model's accuracy differs from the published one; "" if equal."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.1%}, not {published[0].before[name]:.1%}"
        for name, value in record.before.items()
        if value != published[0].before[name]
    )


def gains(record: Record) -> str:
    """Describe the gains of a run."""
    first, last = record.first_reward, record.last_reward
    text = (
        f"mean reward {first:.2f} in the first {NUM_ENDS} steps, {last:.2f} in the last {NUM_ENDS}"
    )
    for name in ("greedy_accuracy", "sampled_accuracy"):
        text += f"; {name.replace('_', ' ')} {record.before[name]:.1%} to {record.after[name]:.1%}"
    return text


def has_too_little_gain(record: Record) -> bool:
    return record.gain < PROMISED_GAIN
