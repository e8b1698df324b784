"""Waits for the weights' group are bounded (tensors: `tests/server/test_fault_matrix.py`)."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from swift_grpo_ext.upstream import weight_sync
from swift_grpo_ext.upstream.weight_sync import within


def test_a_wait_that_keeps_no_bound_is_left() -> None:
    """As torch's store for a host that has stopped."""
    goes_on = threading.Event()
    with pytest.raises(TimeoutError, match=r"weights' group has not answered for 0.02 s"):
        within(0.02, goes_on.wait, rank=1)
    goes_on.set()
    assert within(20.0, goes_on.wait, rank=1) is True

    assert within(20.0, threading.current_thread, rank=0) is threading.current_thread()

    def fails() -> None:
        raise TimeoutError("its own words")

    with pytest.raises(TimeoutError, match="its own words"):
        within(20.0, fails, rank=1)


def test_a_broadcast_of_nccl_is_aborted_in_time() -> None:
    """And the communicator is used no more; gloo's is left alone."""
    aborted = threading.Event()
    calls: list[str] = []

    def abort(comm: str) -> None:
        calls.append(comm)
        aborted.set()

    of_nccl = SimpleNamespace(
        disabled=False, comm="comm", nccl=SimpleNamespace(ncclCommAbort=abort)
    )
    with weight_sync.bounded_broadcasts([of_nccl], 20.0):
        pass
    assert (of_nccl.disabled, calls) == (False, [])
    with (
        pytest.raises(TimeoutError, match=r"not taken within 0.05 s \(--rollout_timeout\)"),
        weight_sync.bounded_broadcasts([SimpleNamespace(), of_nccl], 0.05),
    ):
        assert aborted.wait(20)
    assert (of_nccl.disabled, calls) == (True, ["comm"])
    with weight_sync.bounded_broadcasts([of_nccl], 0.0):  # nothing is left to bound
        pass
