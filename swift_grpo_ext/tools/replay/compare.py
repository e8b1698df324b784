"""Compare logged completions with the same completions generated again. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_grpo_ext.record.row import SampleRow

Logprobs = Sequence[float] | NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A sampled token."""

    token_id: int
    logprob: float | None
    """The log-probability in nats under the distribution that it was sampled from."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One sample, logged and generated again."""

    name: str
    """The sample's name, its `request_id`."""

    seed: int | None
    num_logged: int
    num_generated: int
    """Numbers of tokens."""

    logprob_gap: float | None
    """The largest difference of log-probabilities before the first token that differs, in nats.
    It is near 0 where weights and prompt are the same; None where nothing can be compared."""

    position: int | None
    """The first position at which tokens differ or one completion has ended; None for equal."""

    logged: Token | None = None
    generated: Token | None = None
    """The tokens there; None where that completion had ended."""


def compare(
    row: SampleRow,
    token_ids: Sequence[int],
    logprobs: Logprobs | None,
    decode: Callable[[int], str],
) -> Comparison:
    """Compare a logged sample with the tokens and log-probabilities that were generated again.

    Args:
        decode: gives the text of a token id.
    """
    position = first_difference(row.token_ids, token_ids)
    tokens: list[Token | None] = [None, None]
    if position is not None:
        sides = (row.token_ids, row.logprobs), (token_ids, logprobs)
        for number, (ids, values) in enumerate(sides):
            if position < len(ids):
                logprob = values[position] if values else None
                token_id = ids[position]
                tokens[number] = Token(token_id=token_id, logprob=logprob, text=decode(token_id))
    return Comparison(
        name=row.sample_id.request_id,
        seed=row.seed,
        num_logged=len(row.token_ids),
        num_generated=len(token_ids),
        logprob_gap=logprob_gap(row.logprobs, logprobs, position),
        position=position,
        logged=tokens[0],
        generated=tokens[1],
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first position where tokens differ or one side has ended; None if all agree."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (a, b) in pairs if a != b), None)


def logprob_gap(one: Logprobs | None, other: Logprobs | None, end: int | None) -> float | None:
    """Return the largest difference of log-probabilities of tokens before `end`, in nats; None
    where a side has none."""
    if one is None or other is None:
        return None
    pairs = zip(one[:end], other[:end], strict=True)
    # Two infinities of one sign do not differ; their difference would be NaN.
    gaps = [0.0 if a == b else abs(a - b) for a, b in pairs]
    return max(gaps, default=None) if not any(map(math.isnan, gaps)) else math.nan
