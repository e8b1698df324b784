"""The group that brings weights from a trainer to `swift rollout`: its waits are bounded, and where
there is no accelerator, tensors travel through gloo (`weights/receiver.py` is the other end).

Symptom: without an accelerator NCCL cannot load, so that the broadcast sends nothing and the server
waits for ever; `synchronize()` calls torch.cuda all the same.
Upstream: ms-swift 4.6, rlhf_trainers/vllm_client.py and pipelines/infer/rollout.py.
Can go when ms-swift has a communicator for CPU.
"""

from __future__ import annotations

import datetime
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from swift.rlhf_trainers import vllm_client as upstream_client
from swift.rlhf_trainers.vllm_client import VLLMClient
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from swift_grpo_ext.upstream.patches import patch
from swift_grpo_ext.upstream.threads import in_thread

if TYPE_CHECKING:
    from vllm.distributed.utils import StatelessProcessGroup

BARRIER_SECONDS = 30.0
"""vLLM's own bound of a barrier; a replica that was killed is noticed there."""

MARGIN = 1.1
"""A wait that has lasted this many times its bound is given up from outside."""

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], rank: int) -> T:
    """Return what `work` returns, if it does so in time.

    torch's `TCPStore` gives a wait up only together with its host, rank 0: where that has stopped,
    all others wait without end. Their threads end with the host. The host itself keeps the store's
    own bounds; a thread that it left behind would hold the port that the next group wants.

    Raises:
        TimeoutError: `work` took longer.
    """
    if rank == 0:
        return work()
    outcome = in_thread(work)
    try:
        return outcome.result(MARGIN * seconds)
    except FutureTimeoutError as e:
        if outcome.done():
            raise
        raise TimeoutError(f"the weights' group has not answered for {seconds:g} s") from e


class GlooCommunicator:
    """Broadcasts CPU tensors through gloo, in the place of vLLM's `PyNcclCommunicator`.

    Args:
        group: vLLM's `StatelessProcessGroup`; its store is the rendezvous, and its barrier the
            barrier.
        timeout: seconds for each wait.
    """

    def __init__(self, group: StatelessProcessGroup, timeout: float) -> None:
        self.group = group
        self._timeout = datetime.timedelta(seconds=timeout)
        self.rank: int = group.rank
        self.world_size: int = group.world_size
        self.device = torch.device("cpu")
        self._gloo: list[ProcessGroupGloo] = []
        # Its threads end with it, or at exit: one that outlives the interpreter may abort it.
        weakref.finalize(self, self._gloo.clear)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send `tensor` from rank `src`; every other rank's is overwritten.

        The first call meets all ranks: connecting any earlier would block a server that a trainer
        has still to reach.
        """
        if not self._gloo:
            store = PrefixStore("swift_grpo_ext/weights", self.group.store)
            meet = partial(ProcessGroupGloo, store, self.rank, self.world_size, self._timeout)
            self._gloo.append(within(self._timeout.total_seconds(), meet, self.rank))
        self._gloo[0].broadcast(tensor, root=src).wait()


def connect_client(client: VLLMClient, timeout: float) -> None:
    """Let a connected `VLLMClient` send through gloo; the servers' workers do the same."""

    def broadcast(communicator: GlooCommunicator, tensor: torch.Tensor, src: int) -> None:
        communicator.broadcast(tensor.detach().contiguous().cpu(), src=src)

    def broadcast_all(communicator: GlooCommunicator, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            broadcast(communicator, tensor, communicator.rank)

    client.pynccl_comms = [GlooCommunicator(comm.group, timeout) for comm in client.pynccl_comms]
    patch(
        upstream_client,
        _broadcast_tensors_for_vllm_weight_sync=broadcast_all,
        # ms-swift before 4.5.3 sends them singly, and waits for a device.
        broadcast_tensor_for_vllm_weight_sync=broadcast,
        synchronize=lambda *_: None,
    )


@contextmanager
def bounded_rendezvous(module: Any, timeout: float) -> Iterator[None]:
    """Bound the wait of ms-swift's `module` for the other members of a weight group.

    vLLM's `StatelessProcessGroup.create` waits 300 s, and its barrier 30 s; ms-swift gives them no
    other bounds, and with a host that has stopped they keep none.
    """
    upstream = module.StatelessProcessGroup
    seconds = max(int(timeout), 1)  # the store takes whole
    barrier_seconds = min(timeout, BARRIER_SECONDS)

    class Bounded(upstream):  # type: ignore[misc, valid-type]
        @staticmethod
        def create(*args: Any, **kwargs: Any) -> Any:
            create = partial(upstream.create, *args, **kwargs, store_timeout=seconds)
            rank = kwargs.get("rank", 0)
            group = within(seconds, create, rank)
            barrier = partial(group.barrier, timeout=barrier_seconds)
            group.barrier = partial(within, barrier_seconds, barrier, rank)
            return group

    module.StatelessProcessGroup = Bounded
    try:
        yield
    finally:
        module.StatelessProcessGroup = upstream


@contextmanager
def bounded_broadcasts(communicators: Sequence[Any], timeout: float) -> Iterator[None]:
    """Abort NCCL's communicators after `timeout` seconds: a broadcast to a rank that has ended
    waits for ever. Gloo's have a bound of their own. (Only a stand-in was run: no GPU.)

    Raises:
        TimeoutError: they were aborted.
    """
    of_nccl = [c for c in communicators if not getattr(c, "disabled", True)]
    if not of_nccl:
        yield
        return
    has_fired = threading.Event()

    def abort() -> None:
        has_fired.set()
        for communicator in of_nccl:
            communicator.disabled = True  # what follows must not use it
            communicator.nccl.ncclCommAbort(communicator.comm)

    timer = threading.Timer(timeout, abort)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if has_fired.is_set():
            raise TimeoutError(f"weights were not taken within {timeout:g} s (--rollout_timeout)")
