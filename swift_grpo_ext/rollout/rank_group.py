"""Collectives of the ranks that share an engine: rows to the engine, samples back to their ranks.

A request's row, with its images, travels only to the ranks that drive an engine. A sample travels
only to its own rank.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RolloutError(RuntimeError):
    """The rollout failed on the rank that drives the engines; every rank raises it."""


class RankGroup:
    """The ranks that share an engine; here, a process that has one by itself."""

    rank = 0
    """Number of this process among them, from 0."""

    size = 1
    """Number of ranks."""

    drives_engine = True
    """Whether this process calls the engine."""

    def all_gather(self, value: T) -> list[T]:
        """Return each rank's value, in the order of ranks, on every rank."""
        return [value]

    def gather(self, value: T) -> list[T]:
        """Return each rank's value on ranks that drive an engine; [] on others."""
        return self.all_gather(value)

    def scatter(self, values: list[Any] | Exception | None) -> Any:
        """Return this rank's share of the values that the driving rank holds, one for each rank.

        Raises:
            RolloutError: the driving rank scattered an exception, which itself raises as it is.
        """
        if isinstance(values, Exception):
            raise values
        assert values is not None
        return values[self.rank]


class TensorParallelGroup(RankGroup):
    """Ranks that run one engine together: all of them make the same call."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take the process group that carries Python objects; None stands for the default group."""
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class MainRankGroup(TensorParallelGroup):
    """All training ranks; rank 0 calls the servers."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.drives_engine = self.rank == 0

    def gather(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.size if self.drives_engine else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def scatter(self, values: list[Any] | Exception | None) -> Any:
        failure = f"{type(values).__name__}: {values}" if isinstance(values, Exception) else None
        shares = None
        if self.drives_engine:
            shares = [(failure, None if failure else values[r]) for r in range(self.size)]  # type: ignore[index]
        received: list[Any] = [None]
        dist.scatter_object_list(received, shares, src=0, group=self._group)
        failed, share = received[0]
        if isinstance(values, Exception):
            raise values
        if failed:
            raise RolloutError(f"The rollout failed on rank 0: {failed}")
        return share


def training_ranks(timeout_seconds: float) -> RankGroup:
    """Return all training ranks, which exchange Python objects over gloo; every rank calls it.

    NCCL's watchdog ends a process that waits longer than its timeout, as ranks do in a long rollout
    (ms-swift issue 10065), and NCCL would move objects through the GPU.

    Args:
        timeout_seconds: `--ddp_timeout`, for an exchange.
    """
    if not dist.is_initialized():
        return RankGroup()
    if dist.get_backend() == "gloo":
        return MainRankGroup()
    timeout = timedelta(seconds=timeout_seconds)
    return MainRankGroup(dist.new_group(backend="gloo", timeout=timeout))
