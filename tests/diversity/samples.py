"""Samples for tests of the diversity statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swift_grpo_ext.diversity.sample import Origin, Sample
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

LN2 = float(np.log(2))


def sample(
    token_ids: Sequence[int],
    *,
    bits: float | Sequence[float] | None = 1.0,
    text: str = "",
    fingerprint: str = "prompt",
    group: int = 0,
    index: int = 0,
    step: int = 0,
    phase: Any = "train",
    seed: int | None = None,
    rank: int = 0,
    replica: str = "rank 0",
) -> Sample:
    """A completion; `bits`: of each token, or of all alike."""
    logprobs = None if bits is None else np.full(len(token_ids), 0.0, np.float32)
    if logprobs is not None:
        logprobs[:] = -LN2 * np.asarray(bits, float)
    sample_id = SampleId(phase=phase, step=step, number=0, group=group, index=index)
    return Sample(
        origin=Origin(sample_id=sample_id, seed=seed, rank=rank, replica=replica),
        fingerprint=fingerprint,
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=logprobs,
        text=text,
    )


def group_of(*completions: Sequence[int], group: int = 0, **kwargs: Any) -> list[Sample]:
    return [sample(ids, group=group, index=i, **kwargs) for i, ids in enumerate(completions)]


def row_of(drawn: Sample) -> SampleRow:
    """As the trainer's sample log would hold it."""
    return SampleRow(
        sample_id=drawn.origin.sample_id,
        seed=drawn.origin.seed,
        rank=drawn.origin.rank,
        replica=drawn.origin.replica,
        weight_version=drawn.origin.sample_id.step,
        finish_reason="stop",
        token_ids=drawn.token_ids.tolist(),
        logprobs=None if drawn.logprobs is None else drawn.logprobs.tolist(),
        text=drawn.text,
        fingerprint=drawn.fingerprint,
        prompt='[{"role": "user", "content": "<image>Which digit?"}]',
        media=[],
    )
