"""Repairs of vLLM's engines in a server, and of async engines with several replicas."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from swift.utils import get_logger

from swift_grpo_ext.upstream.patches import patch, replaced

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

logger = get_logger()

SECONDS_TO_CLOSE = 1.0  # grace time for a worker that is shutting down its engine


def exit_when_engine_dies(engine: AsyncLLM | LLMEngine) -> None:
    """Exit this process when one of its engine's processes ends.

    Symptom: after `VLLM::EngineCore` was killed (out of memory, or by CUDA), its worker stays alive
    and answers `/health`, and a weight update waits for it forever.
    Upstream: vLLM 0.32, v1/engine/core_client.py only fails the next request, if one comes;
    ms-swift 4.6, pipelines/infer/rollout.py, watches its workers, not their engines. Can go when a
    worker ends with its engine.
    """
    resources = getattr(engine.engine_core, "resources", None)  # None for an in-process engine
    manager = getattr(resources, "engine_manager", None)
    sentinels = [process.sentinel for process in getattr(manager, "processes", ())]

    def end() -> None:
        connection.wait(sentinels)  # returns when one of them has ended
        time.sleep(SECONDS_TO_CLOSE)
        logger.error("A process of vLLM's engine has ended: this replica ends with it.")
        os._exit(1)  # `sys.exit` would only end this thread

    if sentinels:
        threading.Thread(target=end, daemon=True).start()


def exit_if_engine_is_dead(error: Exception) -> None:
    """Exit this process if its engine's process has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    # The server restarts a replica that has ended. One that answers would stay, without an engine.
    if isinstance(error, EngineDeadError):
        logger.error("vLLM's engine is dead: this replica ends with it.")
        os._exit(1)


def collect_rpc_from_all_replicas(engine: AsyncLLM) -> None:
    """Make an async engine's `collective_rpc` return the answers of all its replicas.

    Symptom: with --vllm_data_parallel_size above 1, only the first replica reports missing weights.
    Upstream: vLLM 0.32, v1/engine/core_client.py: `DPLBAsyncMPClient.call_utility_async` gathers
    all answers and returns the first. Can go when `collective_rpc` returns all replicas' answers.
    """
    core = engine.engine_core

    async def collective_rpc(
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = partial(core._call_utility_async, "collective_rpc", method, timeout, args, kwargs)
        replies = await asyncio.gather(*[call(engine=each) for each in core.core_engines])
        return [answer for reply in replies for answer in reply]

    patch(engine, collective_rpc=collective_rpc)


@contextmanager
def pinned_to_replica(engine: AsyncLLM, replica: int | None) -> Iterator[None]:
    """Send an async engine's requests in the block to one of its replicas; with None, vLLM chooses.
    The block must not `await`, as other requests would then be pinned too.

    Symptom: vLLM spreads a group over its replicas, which all encode its images, and no answer
    names its replica.
    Upstream: ms-swift 4.6, infer_engine/vllm_engine.py: `VllmEngine._add_request` calls
    `AsyncLLM.generate` without a `data_parallel_rank`. Can go when it takes a rank.
    """
    if replica is None:
        yield
        return
    with replaced(engine, "generate", partial(engine.generate, data_parallel_rank=replica)):
        yield
