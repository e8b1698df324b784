"""Completions of earlier rounds, kept by prompt to detect frozen noise. Pure.

The memory holds at most `max_bytes` over all prompts and `MAX_PER_PROMPT` samples of a prompt. The
prompts seen longest ago go first, and the oldest samples of a prompt. A completion is kept up to
`MAX_KEPT_BITS` of surprisal and `MAX_KEPT_TOKENS` tokens: truncation can only hide coincidences,
never create one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from swift_grpo_ext.diversity.sample import Ints, Origin, Sample, surprisal_bits

MAX_BYTES = 64 * 2**20
MAX_PER_PROMPT = 64
MAX_KEPT_BITS = 96.0
MAX_KEPT_TOKENS = 1024
BYTES_BESIDE_TOKENS = 400
"""Of one sample in memory: its objects and names, as `scripts/bench/diversity.py` measures them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EarlierSample:
    """The beginning of a completion of an earlier round."""

    origin: Origin
    token_ids: Ints

    @property
    def num_bytes(self) -> int:
        return BYTES_BESIDE_TOKENS + 4 * len(self.token_ids)


class PromptMemory:
    """Beginnings of completions by prompt."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[str, list[EarlierSample]] = OrderedDict()
        self.num_bytes = 0
        """Estimate of the memory's size."""

    def earlier(self, fingerprint: str) -> list[EarlierSample]:
        """The kept completions of a prompt, oldest first."""
        return self._prompts.get(fingerprint, [])

    def remember(self, samples: Iterable[Sample]) -> None:
        """Keep the samples of a round that is over."""
        for sample in samples:
            if len(sample.token_ids):
                self._keep(sample.fingerprint, _truncate(sample))
        while self.num_bytes > self._max_bytes:
            _, dropped = self._prompts.popitem(last=False)
            self.num_bytes -= sum(kept.num_bytes for kept in dropped)

    def _keep(self, fingerprint: str, kept: EarlierSample) -> None:
        of_prompt = self._prompts.setdefault(fingerprint, [])
        self._prompts.move_to_end(fingerprint)
        of_prompt.append(kept)
        self.num_bytes += kept.num_bytes
        if len(of_prompt) > MAX_PER_PROMPT:
            self.num_bytes -= of_prompt.pop(0).num_bytes


def _truncate(sample: Sample) -> EarlierSample:
    bits = np.cumsum(surprisal_bits(sample)[:MAX_KEPT_TOKENS])
    end = min(int(np.searchsorted(bits, MAX_KEPT_BITS)) + 1, MAX_KEPT_TOKENS)
    tokens = sample.token_ids[:end].astype(np.int32)  # a copy: the whole must not stay alive
    return EarlierSample(origin=sample.origin, token_ids=tokens)
