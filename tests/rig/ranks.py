"""Training ranks for tests: threads that exchange values, and forked processes."""

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


class ThreadRanks(RankGroup):
    """A rank in a thread; rank 0 drives the engine."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(values)
        self.drives_engine = rank == 0
        self._values, self._barrier = values, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered

    def gather(self, value: Any) -> list[Any]:
        gathered = self.all_gather(value)
        return gathered if self.drives_engine else []

    def scatter(self, values: Any) -> Any:
        values = self.all_gather(values)[0]
        if isinstance(values, Exception):
            raise values if self.drives_engine else RolloutError(str(values))
        return values[self.rank]


def run_rank_groups(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """Return the result of `work(ranks)` on each rank. A rank that waits alone is an error."""
    values, barrier = [None] * size, threading.Barrier(size, timeout=120)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(rank, values, barrier)), range(size)))


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
