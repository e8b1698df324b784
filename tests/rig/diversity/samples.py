"""Samples for tests of the diversity statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

LN2 = float(np.log(2))
LONG = list(range(60))
"""At 1 bit a token, an improbable completion."""


def sample(
    token_ids: Sequence[int],
    *,
    bits: float | Sequence[float] | None = 1.0,
    text: str = "",
    prompt: str = "prompt",
    seed: int | None = None,
    rank: int = 0,
    replica: str = "rank 0",
    **place: Any,
) -> SampleRow:
    """Make the row of a completion; `bits`: the surprisal of each token, or of all alike."""
    logprobs = None
    if bits is not None:
        logprobs = np.broadcast_to(-LN2 * np.asarray(bits, float), len(token_ids)).tolist()
    defaults = {"phase": "train", "step": 0, "number": 0, "group": 0, "index": 0}
    sample_id = SampleId(**{**defaults, **place})
    return SampleRow(
        sample_id=sample_id,
        seed=seed,
        rank=rank,
        replica=replica,
        weight_version=sample_id.step,
        finish_reason="stop",
        token_ids=list(token_ids),
        logprobs=logprobs,
        text=text,
        fingerprint=prompt,
        prompt='[{"role": "user", "content": "<image>Which digit?"}]',
        media=[],
    )


def group_of(*completions: Sequence[int], **kwargs: Any) -> list[SampleRow]:
    return [sample(ids, index=i, **kwargs) for i, ids in enumerate(completions)]


def groups_of(*groups: Sequence[Sequence[int]], **kwargs: Any) -> list[list[SampleRow]]:
    """Make a round of groups, each with a prompt of its own."""
    return [group_of(*ids, group=g, prompt=f"{g}", **kwargs) for g, ids in enumerate(groups)]
