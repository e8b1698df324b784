"""Completions as they were logged, against the same completions drawn again. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swift_grpo_ext.sampling.seeding import SampleId


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One completion."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Of `token_ids`, in nats; None where they are not known."""

    def at(self, position: int) -> Token | None:
        """None behind the end."""
        if position >= len(self.token_ids):
            return None
        logprob = None if self.logprobs is None else self.logprobs[position]
        return Token(token_id=self.token_ids[position], logprob=logprob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    token_id: int
    logprob: float | None
    """Under the distribution that it was sampled from, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position at which two completions differ."""

    position: int
    logged: Token | None
    """None where the logged completion had ended."""

    drawn: Token | None
    """None where the one drawn again had ended."""

    @property
    def probability_gap(self) -> float | None:
        """|p(logged) - p(drawn)|, of each token in its own draw; None where one has none. Small
        where the model held both for equally likely; noise can make a tie of any two."""
        logprobs = [token.logprob for token in (self.logged, self.drawn) if token]
        known = [math.exp(logprob) for logprob in logprobs if logprob is not None]
        return abs(known[0] - known[1]) if len(known) == 2 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One sample, logged and drawn again."""

    sample_id: SampleId
    seed: int
    num_logged: int
    """Tokens."""

    num_drawn: int
    difference: Difference | None
    """None where all tokens are equal."""

    logprob_gap: float | None
    """Largest |logged - drawn| of the log-probabilities of the tokens before the first difference,
    in nats: next to 0 where weights and prompt are the same. None where there are none."""

    @property
    def is_equal(self) -> bool:
        return self.difference is None


def compare(sample_id: SampleId, seed: int, logged: Tokens, drawn: Tokens) -> Comparison:
    """Hold one sample's tokens against each other."""
    position = first_difference(logged.token_ids, drawn.token_ids)
    difference = None
    if position is not None:
        difference = Difference(
            position=position, logged=logged.at(position), drawn=drawn.at(position)
        )
    return Comparison(
        sample_id=sample_id,
        seed=seed,
        num_logged=len(logged.token_ids),
        num_drawn=len(drawn.token_ids),
        difference=difference,
        logprob_gap=_logprob_gap(logged, drawn, position),
    )


def first_difference(logged: Sequence[int], drawn: Sequence[int]) -> int | None:
    """The first position whose tokens differ, or behind which only one goes on; None for none."""
    for position, (one, other) in enumerate(zip(logged, drawn, strict=False)):
        if one != other:
            return position
    return None if len(logged) == len(drawn) else min(len(logged), len(drawn))


def _logprob_gap(logged: Tokens, drawn: Tokens, end: int | None) -> float | None:
    if logged.logprobs is None or drawn.logprobs is None:
        return None
    pairs = zip(logged.logprobs[:end], drawn.logprobs[:end], strict=True)
    return max((_gap(one, other) for one, other in pairs), default=None)


def _gap(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other)  # infinities have no difference
