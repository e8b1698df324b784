"""Seeded requests whose prompt is computed in several steps, on CPU.

Symptom: `RuntimeError: CPU Generator does not use offset` ends the engine as soon as the prompt of
a request with a seed does not fit into one step (`max_num_batched_tokens`).
Upstream: vLLM 0.32, `GPUModelRunner._bookkeeping_sync`: a step that computes only a part of a
prompt samples a token all the same, throws it away, and takes the noise back by moving the
generator's offset, which torch's CPU generators do not have.
Here: such a request's generator is put aside for the step, so that it makes no noise at all; the
token that is thrown away is drawn with the global generator.
Can go when vLLM takes the noise back on CPU too.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@cache
def install() -> None:
    """Let vLLM's CPU runner serve seeded requests of any length."""
    sample, bookkeeping_sync = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    @wraps(sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        self._put_aside = {i: generators.pop(i) for i in discarded.tolist() if i in generators}
        return sample(self, *args, **kwargs)

    @wraps(bookkeeping_sync)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return bookkeeping_sync(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(self._put_aside)
            self._put_aside = {}

    CPUModelRunner._sample = _sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync
