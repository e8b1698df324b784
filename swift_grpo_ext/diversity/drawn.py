"""One completion as the diversity statistics take it: arrays, and where it came from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_grpo_ext.sampling.seeding import SampleId

if TYPE_CHECKING:
    from swift_grpo_ext.record.row import SampleRow

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Which sample of a run, and who drew it."""

    sample_id: SampleId
    seed: int | None
    """None where the engine chose."""

    rank: int
    """Training rank that it belongs to."""

    replica: str
    """Which engine drew it; empty where ms-swift does not say."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnSample:
    """One completion."""

    origin: Origin
    fingerprint: str
    """Of the prompt, media included: equal prompts have equal ones."""

    token_ids: Ints
    """[tokens], int32."""

    logprobs: Floats | None
    """[tokens], nats, under the distribution that the tokens were sampled from; NaN where unknown,
    None where all are."""

    text: str


Group = Sequence[DrawnSample]
"""The samples of one prompt's occurrence in a round."""


def drawn_sample(row: SampleRow) -> DrawnSample:
    """From a row of the sample log; log-probabilities that do not match the tokens are unknown."""
    return DrawnSample(
        origin=Origin(sample_id=row.sample_id, seed=row.seed, rank=row.rank, replica=row.replica),
        fingerprint=row.fingerprint,
        token_ids=np.asarray(row.token_ids, np.int32),
        logprobs=_logprobs(row.logprobs, len(row.token_ids)),
        text=row.text,
    )


def _logprobs(values: Sequence[float | None] | None, num_tokens: int) -> Floats | None:
    if num_tokens == 0:
        return np.zeros(0, np.float32)
    if values is None or len(values) != num_tokens:
        return None
    array = np.asarray(values, np.float32)  # None becomes NaN
    return None if np.isnan(array).all() else array


def to_groups(samples: Iterable[DrawnSample]) -> list[list[DrawnSample]]:
    """Samples of any rounds into their groups, by place; each turn is a group of its own.

    A place that comes twice counts once: ranks that share a sequence hold the same samples.
    """
    groups: dict[tuple[Any, ...], dict[int, DrawnSample]] = {}
    for sample in sorted(samples, key=lambda s: s.origin.sample_id):
        sample_id = sample.origin.sample_id
        key = (sample_id.phase, sample_id.step, sample_id.number, sample_id.group, sample_id.turn)
        groups.setdefault(key, {}).setdefault(sample_id.index, sample)
    return [list(group.values()) for group in groups.values()]


def surprisals(sample: DrawnSample) -> Floats:
    """Surprisal of each token, [tokens] float64, bits, at least 0.

    What cannot be known adds nothing, so that sums are never too large: missing values, NaN, minus
    infinity (no token of probability 0 is sampled: the value is of another distribution), and
    roundings above 0.
    """
    if sample.logprobs is None:
        return np.zeros(len(sample.token_ids))
    bits = sample.logprobs.astype(np.float64) / -np.log(2)
    return np.where(np.isfinite(bits), np.maximum(bits, 0.0), 0.0)
