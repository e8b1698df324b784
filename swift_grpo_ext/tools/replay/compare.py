"""Logged completions against the same completions drawn again. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from swift_grpo_ext.record.row import SampleRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    token_id: int
    logprob: float | None
    """Under the distribution that the token was sampled from, in nats."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position at which two completions differ."""

    position: int
    logged: Token | None
    drawn: Token | None
    """None where that completion had ended."""

    probability_gap: float | None
    """|p(logged) - p(drawn)|, of each token in its own draw; None where one has no probability.
    Small where the model found both equally likely; noise can make a tie of any two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One sample, logged and drawn again."""

    name: str
    """As `request_id` makes it."""

    seed: int | None
    equal: bool
    """Whether all tokens are equal."""

    num_logged: int
    num_drawn: int
    """Tokens."""

    logprob_gap: float | None
    """Largest |logged - drawn| log-probability before the first difference, in nats. Near 0 where
    weights and prompt are the same; None where no token has both."""

    difference: Difference | None


def compare(
    row: SampleRow,
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None,
    decode: Callable[[int], str],
) -> Comparison:
    """Compare a logged sample with the tokens and log-probabilities that were drawn again.

    Args:
        logprobs: nats; None where they are unknown.
        decode: gives the text of a token id.
    """

    def token_at(ids: Sequence[int], values: Sequence[float] | None, end: int) -> Token | None:
        if end >= len(ids):
            return None
        return Token(
            token_id=ids[end], logprob=values[end] if values else None, text=decode(ids[end])
        )

    position = first_difference(row.token_ids, token_ids)
    difference = None
    if position is not None:
        logged = token_at(row.token_ids, row.logprobs, position)
        drawn = token_at(token_ids, logprobs, position)
        known = [math.exp(t.logprob) for t in (logged, drawn) if t and t.logprob is not None]
        gap = abs(known[0] - known[1]) if len(known) == 2 else None
        difference = Difference(position=position, logged=logged, drawn=drawn, probability_gap=gap)
    return Comparison(
        name=row.sample_id.request_id,
        seed=row.seed,
        equal=position is None,
        num_logged=len(row.token_ids),
        num_drawn=len(token_ids),
        logprob_gap=_logprob_gap(row.logprobs, logprobs, position),
        difference=difference,
    )


def first_difference(logged: Sequence[int], drawn: Sequence[int]) -> int | None:
    """The first position where tokens differ or one completion has ended; None where all agree."""
    pairs = enumerate(zip_longest(logged, drawn))
    return next((position for position, (one, other) in pairs if one != other), None)


def _logprob_gap(
    logged: Sequence[float] | None, drawn: Sequence[float] | None, end: int | None
) -> float | None:
    if logged is None or drawn is None:
        return None
    pairs = zip(logged[:end], drawn[:end], strict=True)
    # Equal infinities have no difference.
    return max((0.0 if one == other else abs(one - other) for one, other in pairs), default=None)
