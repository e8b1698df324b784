"""Times and peaks of some ways of doing one thing, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch

from scripts.bench.common import Measures as Turn
from scripts.bench.common import interleave
from scripts.bench.peak import peak_bytes


class Measures(NamedTuple):
    """What a way came to; not a number where the device's memory did not suffice."""

    milliseconds: float
    """Median of the turns."""

    peak_bytes: float
    """Memory beyond what was held before."""


def side_by_side(
    ways: Mapping[str, Callable[[], object]], repetitions: int, device: str
) -> dict[str, Measures]:
    """Measure ways in turns, after one turn each that warms up."""

    def turn(work: Callable[[], object]) -> Turn:
        milliseconds = float("nan")

        def timed() -> None:
            nonlocal milliseconds
            milliseconds = milliseconds_of(work, device)

        try:
            peak = float(peak_bytes(timed))
        except torch.OutOfMemoryError:
            peak = float("nan")
        return {"milliseconds": milliseconds, "peak_bytes": peak}

    turns = {name: lambda _, work=work: turn(work) for name, work in ways.items()}
    measured = interleave(turns, repetitions, "turns")
    return {
        name: Measures(*(median(m[key] for m in of_way) for key in of_way[0]))
        for name, of_way in measured.items()
    }


def milliseconds_of(work: Callable[[], object], device: str) -> float:
    """Return how long the device works, from the first kernel's start to the last one's end."""
    if device == "cpu":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
