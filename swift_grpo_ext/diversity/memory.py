"""What is kept of earlier rounds' completions, to see noise that is frozen. Pure.

Bounded: at most `max_bytes` over all prompts (the prompts seen longest ago go first), and
`MAX_PER_PROMPT` samples of a prompt (its oldest go first). Of a completion, the tokens are kept up
to `ENOUGH_BITS` of surprisal, `MAX_KEPT_TOKENS` at most: less than the whole can only hide
coincidences, never make one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from swift_grpo_ext.diversity.drawn import DrawnSample, Ints, Origin, surprisals

MAX_BYTES = 64 * 2**20
MAX_PER_PROMPT = 64
ENOUGH_BITS = 96.0
MAX_KEPT_TOKENS = 1024
BYTES_BESIDE_TOKENS = 400
"""Of one sample in memory: its objects and names, as `scripts/bench/diversity.py` measures them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Remembered:
    """The beginning of an earlier completion."""

    origin: Origin
    token_ids: Ints

    @property
    def num_bytes(self) -> int:
        return BYTES_BESIDE_TOKENS + 4 * len(self.token_ids)


class PromptMemory:
    """Beginnings of completions by prompt."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[str, list[Remembered]] = OrderedDict()
        self.num_bytes = 0
        """Estimate of what is held."""

    def earlier(self, fingerprint: str) -> list[Remembered]:
        """What is kept of a prompt's completions, oldest first."""
        return self._prompts.get(fingerprint, [])

    def remember(self, samples: Iterable[DrawnSample]) -> None:
        """Keep the samples of a round that is over."""
        for sample in samples:
            if len(sample.token_ids):
                self._keep(sample.fingerprint, _beginning(sample))
        while self.num_bytes > self._max_bytes:
            _, dropped = self._prompts.popitem(last=False)
            self.num_bytes -= sum(kept.num_bytes for kept in dropped)

    def _keep(self, fingerprint: str, kept: Remembered) -> None:
        of_prompt = self._prompts.setdefault(fingerprint, [])
        self._prompts.move_to_end(fingerprint)
        of_prompt.append(kept)
        self.num_bytes += kept.num_bytes
        if len(of_prompt) > MAX_PER_PROMPT:
            self.num_bytes -= of_prompt.pop(0).num_bytes


def _beginning(sample: DrawnSample) -> Remembered:
    bits = np.cumsum(surprisals(sample)[:MAX_KEPT_TOKENS])
    end = min(int(np.searchsorted(bits, ENOUGH_BITS)) + 1, MAX_KEPT_TOKENS)
    tokens = sample.token_ids[:end].astype(np.int32)  # a copy: the whole must not stay alive
    return Remembered(origin=sample.origin, token_ids=tokens)
