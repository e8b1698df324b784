"""Computes how many groups dynamic sampling draws at once. Pure, and equal on all ranks."""

from __future__ import annotations

import math
from collections import deque

NUM_WAVES = 8  # the last waves, over which the share of kept groups is measured


class Waves:
    """Chooses the size of each wave so that one wave is expected to fill a batch. Sizes only affect
    a step's time: the first groups with unequal rewards, by round and number, are kept."""

    def __init__(self, batch: int, unit: int, *, draws_ahead: bool) -> None:
        """`batch` is the number of groups in a generation batch. Waves are multiples of `unit`.
        Without `draws_ahead` they have ms-swift's size, which is the batch."""
        self._batch, self._unit, self._draws_ahead = batch, unit, draws_ahead
        self._counts = deque[tuple[int, int]](maxlen=NUM_WAVES)  # kept and drawn of each wave
        self._scoring = 0.0  # share of a wave's time

    def record(self, kept: int, drawn: int, generating: float, scoring: float) -> None:
        """Record how many groups of a wave had unequal rewards, and the wave's seconds."""
        self._counts.append((kept, drawn))
        self._scoring = scoring / ((generating + scoring) or 1.0)

    def first(self) -> int:
        """Return how many groups to draw in addition to a training batch."""
        if not (self._counts and self._draws_ahead):
            return 0
        return self._limited(self._expected(self._batch) - self._batch)

    def further(self, missing: int) -> int:
        """Return how many groups the next wave draws, if `missing` groups are still needed."""
        return self._limited(self._expected(missing) if self._draws_ahead else self._batch)

    def _expected(self, missing: int) -> float:
        """Return how many groups to draw to expect `missing` ones with unequal rewards."""
        kept, drawn = map(sum, zip(*self._counts, strict=True))
        if not kept:
            return math.inf
        share = kept / drawn
        # With one more standard deviation, one wave is enough in five of six cases. Scoring these
        # groups may cost more time than that saves.
        spread = math.sqrt(missing * (1 - share)) / share
        return missing / share + (1 - self._scoring) * spread

    def _limited(self, count: float) -> int:
        return math.ceil(min(count, self._batch) / self._unit) * self._unit
