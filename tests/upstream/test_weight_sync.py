"""Tensors through gloo: from the trainer's end to every other, within a bound."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers import vllm_client
from torch.distributed import TCPStore

from swift_grpo_ext.upstream import weight_sync
from swift_grpo_ext.upstream.weight_sync import (
    GlooCommunicator,
    connect_client,
    within,
)

SINGLY = ("broadcast_tensor_for_vllm_weight_sync", "synchronize")


def groups(world_size: int) -> list[Any]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    stores = [store, *(store.clone() for _ in range(1, world_size))]
    return [
        SimpleNamespace(rank=rank, world_size=world_size, store=own)
        for rank, own in enumerate(stores)
    ]


def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ms-swift's client at the test's end as it was."""
    for name in (*SINGLY, "_broadcast_tensors_for_vllm_weight_sync"):
        monkeypatch.setattr(vllm_client, name, None, raising=False)


@pytest.mark.parametrize("way", ["together", "singly"])
def test_the_last_rank_sends_to_all(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, or singly as ms-swift before 4.5.3 does."""
    put_back(monkeypatch)
    *receiving, sending = groups(3)
    client = SimpleNamespace(pynccl_comms=[SimpleNamespace(group=sending)])
    connect_client(client, 20.0)
    [communicator] = client.pynccl_comms
    tensors = [torch.arange(4.0).reshape(2, 2).T, torch.full((3,), 7, dtype=torch.int32)]

    def receive(group: Any) -> list[torch.Tensor]:
        end = GlooCommunicator(group, 20.0)
        received = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
        for tensor in received:
            end.broadcast(tensor, src=2)
        return received

    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(receive, group) for group in receiving]
        if way == "together":
            vllm_client._broadcast_tensors_for_vllm_weight_sync(communicator, iter(tensors))
        else:
            vllm_client.synchronize()
            for tensor in tensors:
                vllm_client.broadcast_tensor_for_vllm_weight_sync(communicator, tensor, src=2)
        for end in ends:
            received = end.result(20)
            assert all(torch.equal(a, b) for a, b in zip(received, tensors, strict=True))


def test_a_wait_for_the_others_is_bounded() -> None:
    alone, _ = groups(2)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        GlooCommunicator(alone, 0.2).broadcast(torch.zeros(1), src=0)


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
