"""Training ranks for tests: threads that exchange values, and forked processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, multiprocessing

from swift_grpo_ext.ranks import RankGroup, RolloutError

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]


def run_ranks(world_size: int, work: Callable[[int, Gather], T]) -> list[T]:
    """Return the results of `work(rank, gather)` on each rank. A rank that waits alone is an
    error."""
    barrier = threading.Barrier(world_size, timeout=120)
    values: list[Any] = [None] * world_size

    def run(rank: int) -> T:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        return work(rank, gather)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


class ThreadRanks(RankGroup):
    """A rank in a thread; rank 0 drives the engine."""

    def __init__(self, rank: int, size: int, gather: Gather) -> None:
        self.rank, self.size, self._gather = rank, size, gather
        self.drives_engine = rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        return self._gather(value)

    def gather(self, value: Any) -> list[Any]:
        gathered = self.all_gather(value)
        return gathered if self.drives_engine else []

    def scatter(self, values: Any) -> Any:
        values = self.all_gather(values)[0]
        if isinstance(values, Exception):
            raise values if self.drives_engine else RolloutError(str(values))
        return values[self.rank]


def run_rank_groups(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """Return the result of `work(ranks)` on each rank."""
    return run_ranks(size, lambda rank, gather: work(ThreadRanks(rank, size, gather)))


def start_processes(run: Callable[[int, str], None], number: int = 2) -> None:
    """Fork the ranks of a gloo group, which call `run(rank, folder)`; the command line names the
    folder. A collective that only one rank enters fails after two minutes."""
    folder, wait = Path(sys.argv[1]).resolve(), timedelta(seconds=120)
    os.environ |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(number)}

    def join(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        torch.set_num_threads(1)
        place = {"init_method": f"file://{folder}/ranks", "rank": rank, "world_size": number}
        distributed.init_process_group("gloo", timeout=wait, **place)
        run(rank, str(folder))
        distributed.destroy_process_group()

    multiprocessing.start_processes(join, nprocs=number, start_method="fork")
