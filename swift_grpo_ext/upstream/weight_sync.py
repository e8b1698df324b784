"""Bounds for the waits of the group that brings weights from a trainer to `swift rollout`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from swift.utils import get_logger

from swift_grpo_ext.upstream.patches import Moment, patch, repair, replaced
from swift_grpo_ext.upstream.threads import in_thread

BARRIER_SECONDS = 30.0  # vLLM's own bound of a barrier, which notices a killed replica
MARGIN = 1.1  # a wait that has lasted this many times its bound is given up from outside

T = TypeVar("T")

logger = get_logger()


def run_with_timeout(seconds: float, work: Callable[[], T], rank: int) -> T:
    """Return what `work` returns; raise `TimeoutError` where it takes longer.

    Members of torch's `TCPStore` wait without end for a host, rank 0, that has stopped. The host
    itself keeps the store's own bounds: a thread that it left behind would hold the port that the
    next group wants.
    """
    if rank == 0:
        return work()
    outcome = in_thread(work)
    try:
        return outcome.result(MARGIN * seconds)
    except FutureTimeoutError as e:
        if outcome.done():  # `work` itself raised it: it has its own text
            raise
        raise TimeoutError(f"the weights' group has not answered for {seconds:g} s") from e


@repair(
    Moment.CALLED,
    symptom="With a host of the weights' group that has stopped, all others wait without end.",
    upstream="vLLM 0.32, distributed/utils.py (`StatelessProcessGroup`): creating one waits 300 s, "
    "a barrier 30 s, and its store keeps no bound but its own host's; ms-swift 4.6 gives none.",
    until="each wait of the group has the bound that it is given",
)
@contextmanager
def bounded_rendezvous(module: Any, timeout: float) -> Iterator[None]:
    """Bound the wait of ms-swift's `module` for the other members of a weight group."""
    upstream = module.StatelessProcessGroup
    seconds = max(int(timeout), 1)  # the store takes whole
    barrier_seconds = min(timeout, BARRIER_SECONDS)

    def create(*args: Any, **kwargs: Any) -> Any:
        rank = kwargs.get("rank", 0)
        make = partial(upstream.create, *args, **kwargs, store_timeout=seconds)
        group = run_with_timeout(seconds, make, rank)
        group.timeout = timeout  # gloo bounds its waits by it
        barrier = partial(group.barrier, timeout=barrier_seconds)
        patch(group, barrier=partial(run_with_timeout, barrier_seconds, barrier, rank))
        return group

    with replaced(module, "StatelessProcessGroup", SimpleNamespace(create=create)):
        yield


@contextmanager
def bounded_broadcasts(communicators: Sequence[Any], timeout: float) -> Iterator[None]:
    """Give communicators that bound their waits `timeout` seconds.

    NCCL has no bound: a broadcast to a rank that has ended waits for ever, unless another thread
    aborts the communicator, which no GPU has run for us. The wait is logged.
    """
    for communicator in communicators:
        if group := getattr(communicator, "group", None):
            group.timeout = timeout
    if all(getattr(communicator, "disabled", True) for communicator in communicators):
        yield
        return
    text = (
        f"Weights were not taken within {timeout:g} s (--rollout_timeout). NCCL waits for ever "
        "where a replica has ended: see the log of `swift rollout`, end this training, and resume "
        "it from its last checkpoint."
    )
    timer = threading.Timer(timeout, logger.error, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
