"""Defines the result of a check, and the rule that separates rounding from other noise. Pure.

vLLM takes the token with the largest log-probability plus Gumbel noise (or divides probabilities by
exponential noise, which is the same). With one noise, two distributions q and q' give different
tokens with a probability of at most 2 TV(q, q') (Daliri, Musco, Suresh, Coupling without
Communication, arXiv:2408.07978), and TV = E_q |1 - q'/q| / 2, about half the mean difference
between log-probabilities of sampled tokens. So if seeds, weights and prompt are the same, the
number of samples that differ is at most about the sum of those differences over tokens. With other
noise, samples differ though log-probabilities agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.special import pdtrc

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools.diff import first_difference

SAME_TOKENS = "same tokens"
PROMISES = {
    "prompts": "M3",
    "seeds": "S1, S3, S5, S6, G2",
    "stops": "T1 to T4",
    "weights": "M4, M5",
    "logits": "L1, L4, L6",
    SAME_TOKENS: "S2",
}
"""Each check tests some promises (docs/promises.md)."""

ALL = [check for check in PROMISES if check != SAME_TOKENS]
"""The first topology runs these checks. Other topologies have to generate the same tokens."""

REPORT = "Report it with selftest.json."
REMEDIES = {
    "prompts": "docs/support.md lists what ms-swift's templates write differently.",
    "weights": "The engine has other weights, stale caches, or another prompt than the trainer: "
    "`prompts` tests the last.",
    "logits": "Leave out the flags that are named, and report it with selftest.json.",
}
"""Other checks have the remedy `REPORT`."""

Status = Literal["holds", "does not hold", "could not be tried"]

DRIFT_MARGIN = 4.0
"""Measured differences are multiplied by this: they cover only tokens that both sides sampled, and
these differ less."""

FLOOR = 1e-3  # differing samples that are expected if all measured differences are 0
LEAST_P = 1e-6  # p-value (of independent noise, or of rounding) below which a promise is broken


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one check on one topology."""

    check: str
    topology: str = ""
    status: Status = "could not be tried"
    values: dict[str, Any] = field(default_factory=dict)  # measured, with units in the names
    reason: str = ""  # why the promise does not hold, or could not be tried
    remedy: str = ""


class NotTriedError(Exception):
    """A check has nothing to test; the message has the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Flips:
    """The differences of two lists of the same samples."""

    count: int = 0  # samples that differ
    num_samples: int = 0  # in both lists
    drift: float = 0.0  # the sum over tokens of the difference of log-probabilities, in nats
    largest: float = 0.0  # of these differences

    @property
    def is_rounding(self) -> bool:
        """Return whether rounding explains `count`, with the same noise, weights and prompt."""
        expected = DRIFT_MARGIN * self.drift + FLOOR
        return self.count == 0 or float(pdtrc(self.count - 1, expected)) >= LEAST_P

    def __str__(self) -> str:
        return (
            f"{self.count} of {self.num_samples} samples differ; log-probabilities of the tokens "
            f"before agree within {self.largest:.2g} nats"
        )


def flips(one: Sequence[SampleRow], other: Sequence[SampleRow]) -> Flips:
    """Compare samples of equal ids, each up to its first token that differs; a sample that one side
    lacks does not count. All log-probabilities must be known."""
    others = {sample.sample_id: sample for sample in other}
    pairs = [(a, others[a.sample_id]) for a in one if a.sample_id in others]
    count, gaps = 0, [0.0]
    for a, b in pairs:
        end = first_difference(a.token_ids, b.token_ids)
        count += end is not None
        one_logprobs, other_logprobs = (np.asarray(r.logprobs, float)[:end] for r in (a, b))
        gaps += np.abs(one_logprobs - other_logprobs).tolist()
    return Flips(count=count, num_samples=len(pairs), drift=sum(gaps), largest=max(gaps))
