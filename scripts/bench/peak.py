"""Peak memory of a piece of work, counted allocation by allocation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that tensors held at once during `work`, beyond those held before.

    On CPU every allocation and release of torch's allocator counts, inside operators too, as the
    profiler records them; on a GPU it is the allocator's own peak. The same work gives the same
    number each time, unlike a process's resident size.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    kineto = profiler.profiler.kineto_results
    held = peak = 0
    changes = [e for e in kineto.events() if e.name() == "[memory]"]
    for event in sorted(changes, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
