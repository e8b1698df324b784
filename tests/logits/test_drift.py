"""50 bf16 steps in chunks end as near to float32 as 50 steps without chunks."""

from __future__ import annotations

import pytest
from bench.chunk_drift import CHUNKED, ROUNDED, STEPS, WHOLE, measure

pytestmark = [pytest.mark.stack, pytest.mark.extra]


def test_chunks_drift_no_further_than_bf16_itself() -> None:
    rows = measure(seeds=1, vocabulary=1024, hidden=64, steps=STEPS)
    drift = {row["way"]: row for row in rows}
    for kind in ("bf16 weights", "bf16 autocast"):
        whole, chunked, rounded = (drift[f"{kind}: {way}"] for way in (WHOLE, CHUNKED, ROUNDED))
        assert 0 < whole["head"][0] < 1
        for measured in ("weights", "head"):
            assert chunked[measured][0] < 1.25 * whole[measured][0]
        assert rounded["head"] != chunked["head"], "nothing is summed otherwise"
