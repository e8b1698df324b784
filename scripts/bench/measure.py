"""Measure the time and peak memory of several ways to do the same work.

In each repetition every way runs once, in an order that rotates with the repetition. A machine that
becomes slower or faster thus affects all ways alike. The first repetition warms up and is dropped.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

Measures = dict[str, float]
"""Results of one run of one way, such as `seconds` and `peak_bytes`."""

Turn = Callable[[int], Measures]
"""Does the work once; the argument is the number of the repetition, with 0 for the warm-up."""


def interleave(
    ways: Mapping[str, Turn],
    repetitions: int,
    label: str,
    *,
    warms_up: bool = True,
    max_seconds: float = math.inf,
) -> dict[str, list[Measures]]:
    """Return each way's measures of all repetitions.

    Args:
        warms_up: run one more repetition first, and drop its measures.
        max_seconds: start no repetition after this time. If the warm-up alone takes longer, its
            measures are kept.
    """
    names, start = list(ways), time.perf_counter()
    measures: dict[str, list[Measures]] = {name: [] for name in names}
    with tqdm(total=(repetitions + warms_up) * len(names), desc=label, unit="turn") as bar:
        for repetition in range(0 if warms_up else 1, repetitions + 1):
            if time.perf_counter() - start > max_seconds:
                break
            if repetition == 1:
                measures = {name: [] for name in names}
            first = repetition % len(names)
            for name in [*names[first:], *names[:first]]:
                gc.collect()
                measures[name].append(ways[name](repetition))
                bar.update()
    return measures


@contextmanager
def stopwatch(measures: Measures) -> Iterator[None]:
    """Put the block's wall time and this process's CPU time (all threads) into `measures`."""
    cpu, start = time.process_time(), time.perf_counter()
    yield
    measures["seconds"] = time.perf_counter() - start
    measures["cpu_seconds"] = time.process_time() - cpu


def side_by_side(
    ways: Mapping[str, Callable[[], object]],
    repetitions: int,
    label: str,
    max_seconds: float = math.inf,
) -> dict[str, list[Measures]]:
    """Return `seconds` and `peak_bytes` of each run; NaN if the GPU's memory was too small."""

    def turn(work: Callable[[], object], _: int) -> Measures:
        if not torch.cuda.is_available():  # profiling is slow, so the work runs twice
            return {"seconds": work_seconds(work), "peak_bytes": peak_bytes(work)}
        seconds: list[float] = []
        try:
            peak = peak_bytes(lambda: seconds.append(work_seconds(work)))
        except torch.OutOfMemoryError:
            return {"seconds": math.nan, "peak_bytes": math.nan}
        return {"seconds": seconds[0], "peak_bytes": peak}

    turns = {name: partial(turn, work) for name, work in ways.items()}
    return interleave(turns, repetitions, label, max_seconds=max_seconds)


def work_seconds(work: Callable[[], object]) -> float:
    """Return the wall time on a CPU; on a GPU, the time from the first kernel to the last."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the largest increase of the bytes that tensors hold during `work`.

    On a GPU this is the allocator's peak. On a CPU the profiler records all allocations of torch,
    also those inside operators. Unlike a process's resident size, the result is reproducible.
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
