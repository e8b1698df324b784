"""Training ranks as threads, for what all ranks do together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]


def run_ranks(world_size: int, work: Callable[[int, Gather], T]) -> list[T]:
    """What `work(rank, gather)` returns on each rank; a rank that is left waiting is an error."""
    barrier = threading.Barrier(world_size, timeout=120)
    values: list[Any] = [None] * world_size

    def gather_of(rank: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        return gather

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: work(rank, gather_of(rank)), range(world_size)))
