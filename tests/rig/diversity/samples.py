"""Samples for tests of the diversity statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from swift_grpo_ext.record.tables import SampleRow
from tests.rig.record.rows import ROW, sample_id

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
    made = replace(ROW, sample_id=(name := sample_id(**place)), weight_version=name.step, media=[])
    made = replace(made, prompt='[{"role": "user", "content": "<image>Which digit?"}]', text=text)
    made = replace(made, token_ids=list(token_ids), logprobs=logprobs, fingerprint=prompt)
    return replace(made, seed=seed, rank=rank, replica=replica)


def group_of(*completions: Sequence[int], **kwargs: Any) -> list[SampleRow]:
    return [sample(ids, index=i, **kwargs) for i, ids in enumerate(completions)]


def groups_of(*groups: Sequence[Sequence[int]], **kwargs: Any) -> list[list[SampleRow]]:
    """Make a round of groups, each with a prompt of its own."""
    return [group_of(*ids, group=g, prompt=f"{g}", **kwargs) for g, ids in enumerate(groups)]
