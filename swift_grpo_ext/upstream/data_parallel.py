"""The replicas of one async engine: each answers calls, and a request can be meant for one.

Symptom: with `--vllm_data_parallel_size` above 1 the async engine answers a call to its workers for
its first replica alone, though all do what it says: weights that did not arrive at another went
unnoticed. And no request can be given to a certain replica, so that its weights could be probed.
Upstream: vLLM 0.32, v1/engine/core_client.py: `DPLBAsyncMPClient.call_utility_async` gathers all
answers and returns the first. ms-swift 4.6, infer_engine/vllm_engine.py: `VllmEngine._add_request`
calls `AsyncLLM.generate` without its `data_parallel_rank`.
Adaptation: `collective_rpc` of such an engine returns the answers of all workers of all replicas;
`generate` is given the replica's number while ms-swift adds a request that has one.
Can go when vLLM's `collective_rpc` answers for all, and ms-swift's `_add_request` takes a rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import verify

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def hear_all(engine: AsyncLLM) -> None:
    """Have a vLLM `AsyncLLM` with several replicas answer calls to its workers for all of them.

    Raises:
        UnsupportedUpstreamError: vLLM does not have the methods that we know.
    """
    verify(pins.DATA_PARALLEL)
    core = engine.engine_core

    async def collective_rpc(
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = partial(core._call_utility_async, "collective_rpc", method, timeout, args, kwargs)
        of_replicas = await asyncio.gather(*[call(engine=each) for each in core.core_engines])
        return [answer for of_workers in of_replicas for answer in of_workers]

    engine.collective_rpc = collective_rpc


@contextmanager
def drawn_by(engine: AsyncLLM, replica: int | None) -> Iterator[None]:
    """Give an `AsyncLLM`'s requests that are added meanwhile to one of its replicas; None leaves
    them to vLLM. The context may hold no `await`: another request would slip in."""
    if replica is None:
        yield
        return
    engine.generate = partial(engine.generate, data_parallel_rank=replica)
    try:
        yield
    finally:
        del engine.generate  # the class's own is there again
