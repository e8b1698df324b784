"""Repairs of vLLM have their effect."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from swift_grpo_ext.upstream import vllm_repairs


class AsyncLLM(SimpleNamespace):
    """vLLM's engine, by its name."""


def test_a_call_is_answered_for_all_replicas() -> None:
    """Two replicas of one worker and of two."""
    asked: list[Any] = []

    async def call(*args: Any, engine: str) -> list[str]:
        asked.append(args)
        return [f"{engine}.{worker}" for worker in range(1 + (engine == "b"))]

    core = SimpleNamespace(core_engines=["a", "b"], _call_utility_async=call)
    engine: Any = AsyncLLM(engine_core=core, collective_rpc=None)
    vllm_repairs.collect_rpc_from_all_replicas(engine)
    answers = asyncio.run(engine.collective_rpc("load", 2.0, (1,), {"k": 3}))
    assert answers == ["a.0", "b.0", "b.1"]
    assert asked == [("collective_rpc", "load", 2.0, (1,), {"k": 3})] * 2
    asyncio.run(engine.collective_rpc("load"))
    assert asked[2:] == [("collective_rpc", "load", None, (), None)] * 2
