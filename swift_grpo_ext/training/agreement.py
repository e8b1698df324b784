"""Whether a rollout and the training on it saw the same (SPEC M3, M5, M6). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan


class DisagreementError(RuntimeError):
    """What a rollout says of a sample is not what training on it sees."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far log-probabilities of the same tokens lie apart, in nats."""

    total: float = 0.0
    """Sum of absolute differences."""

    count: int = 0
    """Number of tokens."""

    largest: float = 0.0

    @property
    def mean(self) -> float:
        """0 where there was no token."""
        return self.total / self.count if self.count else 0.0

    def __add__(self, other: Gap) -> Gap:
        # NaN is the largest: Python's `max` returns it only where it stands first.
        is_larger = isnan(self.largest) or self.largest > other.largest
        largest = self.largest if is_larger else other.largest
        return Gap(self.total + other.total, self.count + other.count, largest)


def gap_limit(bits: int, temperature: float = 1.0) -> float:
    """Return the mean gap, in nats, above which something is wrong rather than imprecise.

    A log-probability is a difference of logits, of which large models have some around 2^4. A float
    of 16 bits that keeps 8 of them as its mantissa (bfloat16) rounds those to steps of 2^-4, by
    2^-5 at most; layers before add to it, and averaging over tokens takes from it. Twice a step is
    beyond that. 32 bits round to 2^-19 there; their limit is that of kernels that sum in different
    orders, with a wide margin. Other weights, another prompt or dropout lie well above both: with
    LoRA's default dropout of 0.05 single ratios were off by 0.7 to 1 nats.

    Args:
        bits: of the less precise of both sides' numbers.
        temperature: of the sampling. Logits are divided by it, and their rounding with them; one
            above 1 leaves the limit as it is.
    """
    return (0.125 if bits <= 16 else 0.01) / min(temperature or 1.0, 1.0)


def check_counts(name: str, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
    """Raise `DisagreementError` where a sample has another number of log-probabilities."""
    if logprobs and len(logprobs) != len(token_ids):
        raise DisagreementError(
            f"{name}: {len(token_ids)} sampled tokens and {len(logprobs)} log-probabilities came "
            "back from the engine."
        )
