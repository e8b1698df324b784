"""Collectives of the ranks that share an engine: rows to the engine, samples back to their ranks.

A request's row, with its images, travels only to the ranks that drive an engine. A sample travels
only to its own rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from swift_grpo_ext.upstream.threads import in_thread

T = TypeVar("T")

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable by which gloo knows where to listen; else by the host's name."""

SECONDS_TO_CONNECT = 300.0
"""For the ranks of all nodes, which begin within seconds of one another."""


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

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on all ranks, on every rank."""
        return all(self.all_gather(holds))

    def gather(self, value: T) -> list[T]:
        """Return each rank's value on ranks that drive an engine; [] on others."""
        return self.all_gather(value)

    def end(self) -> None:
        """Leave the other ranks, which raise where they wait for this one; for one that failed."""

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
    """All training ranks; rank 0 calls the servers.

    Args:
        group: no other object holds it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.drives_engine = self.rank == 0

    def end(self) -> None:
        # gloo closes its connections once no object holds the group.
        dist.destroy_process_group(self._group)
        self._group = dist.GroupMember.NON_GROUP_MEMBER

    def gather(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.size if self.drives_engine else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def scatter(self, values: list[Any] | Exception | None) -> Any:
        # As text: not every exception can be pickled.
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

    Raises:
        ConnectionError: the ranks do not reach one another; names the setting.
    """
    if not dist.is_initialized():
        return RankGroup()
    seconds = min(SECONDS_TO_CONNECT, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    with _listening_to_all_nodes():
        # In a thread, which can be left: gloo bounds each of its tries, and a rank that is not
        # reached notices nothing.
        made = in_thread(partial(dist.new_group, backend="gloo", timeout=timeout))
        try:
            return MainRankGroup(made.result(seconds))
        except (RuntimeError, FutureTimeoutError) as e:
            listens_at = os.environ.get(INTERFACE) or f"the address of {socket.gethostname()}"
            cause = str(e) or f"no answer within {seconds:g} s"
            reaches = os.environ.get("MASTER_ADDR", "MASTER_ADDR")
            raise ConnectionError(
                f"The training's ranks do not reach one another over gloo ({cause}). This one "
                f"listens at {listens_at}. Set {INTERFACE} on each node to the network interface "
                f"that reaches the other nodes (`ip route get {reaches}`)."
            ) from e


@contextmanager
def _listening_to_all_nodes() -> Iterator[None]:
    """Have gloo listen, on each of several nodes, at the interface that reaches the others.

    It would take the one that the host's name stands for, which Debian's /etc/hosts says is
    127.0.1.1: ranks of other nodes could not connect.
    """
    size_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if os.environ.get(INTERFACE) or size_here >= dist.get_world_size():
        yield  # the user has chosen, or all ranks are on this node
        return
    address = address_to(os.environ.get("MASTER_ADDR", ""))
    store, key = dist.distributed_c10d._get_default_store(), "swift_grpo_ext/second_node"
    if dist.get_rank() == size_here:  # the first rank of the second node
        store.set(key, address or "")
    if address is None:  # on the first node, whose own name says where it is for itself
        store.wait([key], timedelta(seconds=SECONDS_TO_CONNECT))
        address = address_to(store.get(key).decode())
    if (interface := interface_of(address)) is None:
        yield  # gloo's own choice; where that does not connect, the error names the setting
        return
    os.environ[INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(INTERFACE)


def address_to(host: str) -> str | None:
    """Return this machine's address by which it sends to `host`; None where that is itself alone,
    or unknown. Nothing is sent."""
    with suppress(OSError):
        # Where a UDP socket is connected, the kernel chooses its route, and with it its address.
        for family, kind, protocol, _, target in socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                address = str(probe.getsockname()[0])
                if not ip_address(address.partition("%")[0]).is_loopback:
                    return address
    return None


def interface_of(address: str | None) -> str | None:
    """Return the name of the network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [known.address for known in addresses]:
            return name
    return None
