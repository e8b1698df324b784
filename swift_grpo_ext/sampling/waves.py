"""How many groups dynamic sampling draws at once. Pure, and the same on all ranks."""

from __future__ import annotations

import math
from collections import deque

NUM_WAVES = 8  # over which the share of kept groups is measured


class Waves:
    """Chooses the sizes of waves, so that one is expected to leave a full batch. Sizes only change
    how long a step takes: the first groups with unequal rewards, by round and number, are kept."""

    def __init__(self, batch: int, unit: int, *, draws_ahead: bool) -> None:
        """`batch` is the number of groups in a generation batch. Waves are multiples of `unit`.
        Without `draws_ahead` they have ms-swift's size, which is the batch."""
        self._batch, self._unit, self._draws_ahead = batch, unit, draws_ahead
        self._counts = deque[tuple[int, int]](maxlen=NUM_WAVES)  # kept and drawn of each wave
        self._scoring = 0.0  # share of a wave's time

    def record(self, kept: int, drawn: int, generating: float, scoring: float) -> None:
        """Note how many groups of a wave had unequal rewards, and its seconds."""
        self._counts.append((kept, drawn))
        self._scoring = scoring / ((generating + scoring) or 1.0)

    def first(self) -> int:
        """Return how many groups to draw beside a batch of training."""
        if not (self._counts and self._draws_ahead):
            return 0
        return self._limited(self._expected(self._batch) - self._batch)

    def further(self, missing: int) -> int:
        """Return how many groups to draw once more, where `missing` groups have to be found."""
        return self._limited(self._expected(missing) if self._draws_ahead else self._batch)

    def _expected(self, missing: int) -> float:
        """Return how many groups to draw for `missing` ones with unequal rewards."""
        kept, drawn = map(sum, zip(*self._counts, strict=True))
        if not kept:
            return math.inf
        share = kept / drawn
        # One standard deviation more makes one wave enough in five of six cases. Its scores may
        # cost more time than it saves.
        spread = math.sqrt(missing * (1 - share)) / share
        return missing / share + (1 - self._scoring) * spread

    def _limited(self, count: float) -> int:
        return math.ceil(min(count, self._batch) / self._unit) * self._unit
