"""Samples for tests of the diversity statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swift_grpo_ext.diversity.sample import Origin, Sample
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
) -> Sample:
    """Make a completion; `bits`: the surprisal of each token, or of all alike."""
    logprobs = None
    if bits is not None:
        logprobs = np.full(len(token_ids), 0.0, np.float32)
        logprobs[:] = -LN2 * np.asarray(bits, float)
    defaults = {"phase": "train", "step": 0, "number": 0, "group": 0, "index": 0}
    sample_id = SampleId(**{**defaults, **place})
    return Sample(
        origin=Origin(sample_id=sample_id, seed=seed, rank=rank, replica=replica),
        prompt_hash=prompt,
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=logprobs,
        text=text,
    )


def group_of(*completions: Sequence[int], **kwargs: Any) -> list[Sample]:
    return [sample(ids, index=i, **kwargs) for i, ids in enumerate(completions)]


def groups_of(*groups: Sequence[Sequence[int]], **kwargs: Any) -> list[list[Sample]]:
    """Make a round of groups, each with a prompt of its own."""
    return [group_of(*ids, group=g, prompt=f"{g}", **kwargs) for g, ids in enumerate(groups)]


def row_of(generated: Sample) -> SampleRow:
    """Return the row that the trainer's sample log would hold."""
    return SampleRow(
        sample_id=generated.origin.sample_id,
        seed=generated.origin.seed,
        rank=generated.origin.rank,
        replica=generated.origin.replica,
        weight_version=generated.origin.sample_id.step,
        finish_reason="stop",
        token_ids=generated.token_ids.tolist(),
        logprobs=None if generated.logprobs is None else generated.logprobs.tolist(),
        text=generated.text,
        fingerprint=generated.prompt_hash,
        prompt='[{"role": "user", "content": "<image>Which digit?"}]',
        media=[],
    )
