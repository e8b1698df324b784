"""Collectives for the ranks that share an engine. Requests go only to the ranks that call the
engine, and each sample goes only to its own rank."""

from __future__ import annotations

import os
import socket
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from swift_grpo_ext.upstream.threads import in_thread

T = TypeVar("T")

INTERFACE = "GLOO_SOCKET_IFNAME"  # names the network interface at which gloo listens
SECONDS_TO_CONNECT = 300.0  # ranks of all nodes begin within seconds of one another


class RolloutError(RuntimeError):
    """The rollout failed on another rank; every rank raises."""


class RankGroup:
    """The ranks that share an engine; this base class is a single process."""

    rank = 0
    size = 1
    drives_engine = True  # whether this process calls the engine

    def all_gather(self, value: T) -> list[T]:
        """Return each rank's value, in the order of ranks, on every rank."""
        return [value]

    def all_gather_or_raise(self, value: T, failure: Exception | None) -> list[T]:
        """Return each rank's value on every rank. If any rank failed, raise this rank's own
        `failure`, or a `RolloutError` that names the first rank that failed."""
        text = f"{type(failure).__name__}: {failure}" if failure else ""
        values, texts = zip(*self.all_gather((value, text)), strict=True)
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text:
                raise RolloutError(f"The rollout failed on rank {rank}: {text}")
        return [*values]

    def gather(self, value: T) -> list[T]:
        """Return each rank's value on ranks that drive an engine; [] on others."""
        return self.all_gather(value)

    def end(self) -> None:
        """Leave the group after a failure, so that ranks waiting for this one raise."""

    def scatter(self, values: list[Any] | Exception | None) -> Any:
        """Return this rank's value from the driving rank's list, which has one value for each rank.
        If the list is an exception, the driving rank raises it and the others `RolloutError`."""
        if isinstance(values, Exception):
            raise values
        assert values is not None
        return values[self.rank]


class TensorParallelGroup(RankGroup):
    """The ranks of a tensor-parallel engine, which all make the same calls."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class MainRankGroup(TensorParallelGroup):
    """All training ranks; rank 0 calls the servers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.drives_engine = self.rank == 0

    def end(self) -> None:
        # gloo closes its connections when the last reference to the group is dropped.
        dist.destroy_process_group(self._group)
        self._group = dist.GroupMember.NON_GROUP_MEMBER

    def gather(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.size if self.drives_engine else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def scatter(self, values: list[Any] | Exception | None) -> Any:
        shares, received = values, list[Any]([None])
        if isinstance(values, Exception):  # as text: not every exception can be pickled
            text = f"The rollout failed on rank 0: {type(values).__name__}: {values}"
            shares = [RolloutError(text)] * self.size
        dist.scatter_object_list(received, shares, src=0, group=self._group)
        if isinstance(values, Exception):
            raise values
        if isinstance(received[0], RolloutError):
            raise received[0]
        return received[0]


def training_ranks(timeout_seconds: float) -> RankGroup:
    """Return a gloo group of all training ranks. Its collectives wait up to `timeout_seconds`
    (`--ddp_timeout`). Every rank calls it. Raise ConnectionError if the ranks cannot connect."""
    if not dist.is_initialized():
        return RankGroup()
    seconds = min(SECONDS_TO_CONNECT, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    # Not NCCL: its watchdog kills a rank that waits through a long rollout (ms-swift issue 10065),
    # and it would move objects through the GPU. In a thread, which can be abandoned: gloo's timeout
    # is for one attempt, and a rank that the others do not reach would wait on.
    made = in_thread(partial(dist.new_group, backend="gloo", timeout=timeout))
    try:
        return MainRankGroup(made.result(seconds))
    except (RuntimeError, FutureTimeoutError) as e:
        # By default gloo listens at the address of the host's name: on Debian that is 127.0.1.1.
        listens_at = os.environ.get(INTERFACE) or f"the address of {socket.gethostname()}"
        cause = str(e) or f"no answer within {seconds:g} s"
        reaches = os.environ.get("MASTER_ADDR", "MASTER_ADDR")
        raise ConnectionError(
            f"The training's ranks do not reach one another over gloo ({cause}). This one listens "
            f"at {listens_at}. Set {INTERFACE} on each node to the network interface that reaches "
            f"the other nodes (`ip route get {reaches}`)."
        ) from e
