"""Samples that should be equal, drawn twice: is a difference rounding, or other noise? Pure.

vLLM draws the token with the largest log-probability plus Gumbel noise (or divides probabilities by
exponential noise, which is the same). With one noise, two distributions q and q' give different
tokens with a probability of at most 2 TV(q, q') (Daliri, Musco, Suresh, Coupling without
Communication, arXiv:2408.07978), and TV = E_q |1 - q'/q| / 2, about half the mean difference
between log-probabilities of drawn tokens. So where seeds, weights and prompt are the same, the
flips over all tokens are at most about the sum of those differences. Other noise gives flips where
log-probabilities agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

from scipy.special import pdtrc

from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.replay.compare import first_difference

MARGIN = 4.0
"""Differences are measured on tokens that were drawn alike, which lie closer than others."""

FLOOR = 1e-3
"""Flips that are expected of a handful of tokens whose differences were measured as 0."""

LEAST_P = 1e-6
MOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One completion."""

    sample_id: SampleId
    token_ids: list[int]
    logprobs: list[float]
    """In nats; empty where the engine gives none."""

    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Where two draws of the same samples part."""

    num_tokens: int = 0
    """Compared: to the first difference of each sample, that token inclusive."""

    count: int = 0
    """Samples that part."""

    drift: float = 0.0
    """Sum over tokens of the difference between log-probabilities, in nats."""

    largest: float = 0.0
    """Of these differences."""

    first: tuple[dict[str, Any], ...] = ()
    """Some of them: sample, position, and how far apart both candidates' probabilities are."""

    @property
    def per_thousand(self) -> float:
        return 1000 * self.count / self.num_tokens if self.num_tokens else 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether so many flips are no wonder where noise, weights and prompt are the same."""
        expected = MARGIN * self.drift + FLOOR
        return self.count == 0 or float(pdtrc(self.count - 1, expected)) >= LEAST_P

    def values(self) -> dict[str, Any]:
        return {
            "tokens": self.num_tokens,
            "flips": self.count,
            "flips per 1,000 tokens": round(self.per_thousand, 3),
            "largest log-probability difference (nats)": float(f"{self.largest:.2g}"),
            **({"first flips": list(self.first)} if self.first else {}),
        }

    def __add__(self, other: Flips) -> Flips:
        return Flips(
            num_tokens=self.num_tokens + other.num_tokens,
            count=self.count + other.count,
            drift=self.drift + other.drift,
            largest=max(self.largest, other.largest),
            first=(*self.first, *other.first)[:MOST_SHOWN],
        )


def flips(one: Sequence[Drawn], other: Sequence[Drawn]) -> Flips:
    """Compare draws by the samples' names; those that only one side has do not count."""
    others = {drawn.sample_id: drawn for drawn in other}
    pairs = ((drawn, others[drawn.sample_id]) for drawn in one if drawn.sample_id in others)
    return sum((_flip(*pair) for pair in pairs), Flips())


def _flip(one: Drawn, other: Drawn) -> Flips:
    position = first_difference(one.token_ids, other.token_ids)
    end = len(one.token_ids) if position is None else position
    gaps = [
        0.0 if a == b else abs(a - b)
        for a, b in zip(one.logprobs[:end], other.logprobs[:end], strict=False)
    ]
    found = Flips(num_tokens=end, drift=sum(gaps), largest=max(gaps, default=0.0))
    if position is None:
        return found
    candidates = [d.logprobs[position] for d in (one, other) if position < len(d.logprobs)]
    apart = abs(exp(candidates[0]) - exp(candidates[1])) if len(candidates) == 2 else None
    where = {
        "sample": str(one.sample_id),
        "token": position,
        "probabilities apart": None if apart is None else float(f"{apart:.3g}"),
    }
    return found + Flips(num_tokens=1, count=1, first=(where,))
