"""Waits for the weights' group are bounded, but for NCCL's, which are logged [F2]. A call reaches
all replicas. `tests/stack/test_fault_matrix.py` stops real processes."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.upstream import vllm_repairs, weight_sync


def test_a_broadcast_of_nccl_that_waits_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator of NCCL is left alone, since no GPU has run this; gloo's group gets its
    bound."""
    told = threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        told.set()

    monkeypatch.setattr(weight_sync.logger, "error", log)
    of_nccl, of_gloo = SimpleNamespace(disabled=False), SimpleNamespace(group=SimpleNamespace())
    with weight_sync.bounded_broadcasts([of_nccl], 0.05):
        assert told.wait(20)
    [line] = lines
    assert "Weights were not taken within 0.05 s (--rollout_timeout)" in line
    assert vars(of_nccl) == {"disabled": False}
    with weight_sync.bounded_broadcasts([of_gloo, of_nccl], 20.0):
        pass
    with weight_sync.bounded_broadcasts([of_gloo], 0.0):
        pass
    assert (of_gloo.group.timeout, len(lines)) == (0.0, 1)


class AsyncLLM(SimpleNamespace):
    """vLLM's engine, by its name."""


def test_a_call_is_answered_for_all_replicas() -> None:
    async def call(*args: Any, engine: str) -> list[Any]:
        return [engine, args]

    core = SimpleNamespace(core_engines=["a", "b"], _call_utility_async=call)
    engine: Any = AsyncLLM(engine_core=core, collective_rpc=None)
    vllm_repairs.collect_rpc_from_all_replicas(engine)
    call_1, call_2 = ("collective_rpc", "load", 2.0, (1,), {"k": 3}), ("load", None, (), None)
    assert asyncio.run(engine.collective_rpc(*call_1[1:])) == ["a", call_1, "b", call_1]
    assert asyncio.run(engine.collective_rpc("load"))[1] == ("collective_rpc", *call_2)
