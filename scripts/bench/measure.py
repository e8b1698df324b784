"""Measures ways of doing one thing side by side: seconds, and peaks of memory.

In each repetition every way has its turn, in an order that rotates from one repetition to the next,
so that a machine that grows slower or faster does so for all of them. The first repetition warms up
and is thrown away.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

Measures = dict[str, float]
"""One turn of one way came to this: `seconds`, `cpu_seconds`, `tokens`, bytes."""

Turn = Callable[[int], Measures]
"""Does the work once; the argument is the number of the repetition, from 0 (the warm-up)."""


def interleave(
    ways: Mapping[str, Turn],
    repetitions: int,
    label: str,
    *,
    warms_up: bool = True,
    max_seconds: float = math.inf,
) -> dict[str, list[Measures]]:
    """Return the measures of each way, one for each repetition.

    Args:
        warms_up: run a repetition more before the others, and leave it out.
        max_seconds: begin no further repetition after these. Where the warm-up alone takes longer,
            it counts.
    """
    names, start = list(ways), time.perf_counter()
    measures: dict[str, list[Measures]] = {name: [] for name in names}
    with tqdm(total=(repetitions + warms_up) * len(names), desc=label, unit="turn") as bar:
        for repetition in range(0 if warms_up else 1, repetitions + 1):
            if time.perf_counter() - start > max_seconds:
                break
            if repetition == 1:
                measures = {name: [] for name in names}
            for name in rotated(names, repetition):
                gc.collect()
                measures[name].append(ways[name](repetition))
                bar.update()
    return measures


def rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


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
    device: str,
    label: str,
    max_seconds: float = math.inf,
) -> dict[str, list[Measures]]:
    """Return `seconds` and `peak_bytes` of each turn; not numbers where memory did not suffice."""

    def turn(work: Callable[[], object], _: int) -> Measures:
        if device == "cpu":  # to count allocations takes time: in a turn of its own
            return {"seconds": device_seconds(work, device), "peak_bytes": peak_bytes(work)}
        seconds = peak = math.nan

        def timed() -> None:
            nonlocal seconds
            seconds = device_seconds(work, device)

        try:
            peak = peak_bytes(timed)
        except torch.OutOfMemoryError:
            seconds = math.nan
        return {"seconds": seconds, "peak_bytes": peak}

    turns = {name: partial(turn, work) for name, work in ways.items()}
    return interleave(turns, repetitions, label, max_seconds=max_seconds)


def device_seconds(work: Callable[[], object], device: str) -> float:
    """Return how long the device works, from the first kernel's start to the last one's end."""
    if device == "cpu":
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
