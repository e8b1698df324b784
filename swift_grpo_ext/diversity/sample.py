"""One completion as the diversity statistics take it: arrays, and where it came from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_grpo_ext.sampling.seeding import SampleId

if TYPE_CHECKING:
    from swift_grpo_ext.record.tables import SampleRow

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Names a sample of a run, and the engine that generated it."""

    sample_id: SampleId
    seed: int | None
    """None where the engine chose."""

    rank: int
    """Training rank that owns the sample."""

    replica: str
    """The engine's name; empty where ms-swift gives none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One completion."""

    origin: Origin
    prompt_hash: str
    """Identifies the prompt, media included."""

    token_ids: Ints
    """[tokens], int32."""

    logprobs: Floats | None
    """[tokens], nats, under the distribution that the tokens were sampled from. NaN where unknown;
    None if all are unknown."""

    text: str


Group = Sequence[Sample]
"""The samples of one prompt's occurrence in a round."""


def sample_from_row(row: SampleRow) -> Sample:
    """Convert a row of the sample log. Log-probabilities that do not match the tokens in number
    count as unknown."""
    logprobs = None
    if row.logprobs is not None and len(row.logprobs) == len(row.token_ids):
        logprobs = np.asarray(row.logprobs, np.float32)  # None becomes NaN
        if len(logprobs) and np.isnan(logprobs).all():
            logprobs = None
    return Sample(
        origin=Origin(sample_id=row.sample_id, seed=row.seed, rank=row.rank, replica=row.replica),
        prompt_hash=row.fingerprint,
        token_ids=np.asarray(row.token_ids, np.int32),
        logprobs=logprobs,
        text=row.text,
    )


def group_samples(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Sort the samples of any rounds into groups, by sample id. Each turn is a group of its own.

    An id that comes twice counts once: ranks that share a sequence hold the same samples.
    """
    groups: dict[tuple[Any, ...], dict[int, Sample]] = {}
    for sample in sorted(samples, key=lambda s: s.origin.sample_id):
        sample_id = sample.origin.sample_id
        key = (*sample_id.round, sample_id.group, sample_id.turn)
        groups.setdefault(key, {}).setdefault(sample_id.index, sample)
    return [list(group.values()) for group in groups.values()]


def surprisal_bits(sample: Sample) -> Floats:
    """Return the surprisal of each token, -log2 q, [tokens] float64, at least 0.

    Unknown values add nothing, so that sums are never too large: missing values, NaN, minus
    infinity (no token of probability 0 is sampled: the value is of another distribution), and
    roundings above 0.
    """
    if sample.logprobs is None:
        return np.zeros(len(sample.token_ids))
    bits = sample.logprobs.astype(np.float64) / -np.log(2)
    return np.where(np.isfinite(bits), np.maximum(bits, 0.0), 0.0)
