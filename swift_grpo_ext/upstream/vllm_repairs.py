"""Repairs of vLLM; `patches.py` says why each of them is there."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import count
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from swift.utils import get_logger

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import verify
from swift_grpo_ext.upstream.patches import patch, replaced

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

logger = get_logger()


def name_media_by_request() -> None:
    """Name an image by its request instead of its content; a group's samples still share it."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.processor import Processor

    if hasattr(LLMEngine, "reset_encoder_cache"):  # ms-swift calls it after each update
        return
    process, numbers = Processor.process_inputs, count()

    @wraps(process)
    def process_inputs(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        # With a number of our own: ms-swift's request ids come again in each round.
        named = self._maybe_build_mm_uuids(f"{next(numbers)}-{request_id}", prompt)
        if named and isinstance(prompt, dict):
            prompt = {"multi_modal_uuids": named, **prompt}
        return process(self, request_id, prompt, *args, **kwargs)

    patch(Processor, process_inputs=process_inputs)


def load_processors_uncopied() -> None:
    """While vLLM loads a processor, let a deep copy of the tokenizer that it hands over be that
    tokenizer. Nothing depends on it but time."""
    from vllm.transformers_utils import processor as upstream

    get_processor = upstream.get_processor

    @wraps(get_processor)
    def load(*args: object, **kwargs: object) -> Any:
        tokenizer = kwargs.get("tokenizer")
        if not hasattr(tokenizer, "__dict__"):
            return get_processor(*args, **kwargs)
        # `copy.deepcopy` looks for this on the object, so that other tokenizers are copied as ever.
        with replaced(tokenizer, "__deepcopy__", lambda memo: tokenizer):
            return get_processor(*args, **kwargs)

    patch(upstream, get_processor=load, cached_get_processor=lru_cache(load))


def leave_out_broken_plugins() -> None:
    """Have `VLLM_PLUGINS` name all plugins but one that vLLM 0.11 cannot load."""
    if find_spec("vllm.model_executor.models.qwen3_5") is None and "VLLM_PLUGINS" not in os.environ:
        groups = [group for group in entry_points().groups if group.startswith("vllm.")]
        names = {e.name for group in groups for e in entry_points(group=group)} - {"swift_uembed"}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names))


# --- a server's replica ---

SECONDS_TO_CLOSE = 1.0


def end_with_core(engine: AsyncLLM | LLMEngine) -> None:
    """Have this process end when a process of its engine does, however that came.

    Symptom: after `VLLM::EngineCore` was killed (for its memory, or by CUDA), the worker above it
    lives on and answers `/health`, and a weight update waits for it without end.
    Upstream: vLLM 0.32, v1/engine/core_client.py: it is said with the next request, if any;
    ms-swift 4.6, pipelines/infer/rollout.py, watches its workers, not their engines. Can go when a
    worker ends with its engine.
    """
    resources = getattr(engine.engine_core, "resources", None)  # none where it has no processes
    manager = getattr(resources, "engine_manager", None)
    sentinels = [process.sentinel for process in getattr(manager, "processes", ())]

    def end() -> None:
        connection.wait(sentinels)  # returns when one of them has ended
        time.sleep(SECONDS_TO_CLOSE)  # for a worker that is closing it
        logger.error("A process of vLLM's engine has ended: this replica ends with it.")
        os._exit(1)  # `sys.exit` would end this thread alone

    if sentinels:
        threading.Thread(target=end, daemon=True).start()


def end_if_dead(error: Exception) -> None:
    """End this process where an engine says that its process has ended: an answer would be that of
    a replica that goes on."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError):
        logger.error("vLLM's engine is dead: this replica ends with it.")
        os._exit(1)


# --- an async engine with several replicas ---


def hear_all(engine: AsyncLLM) -> None:
    """Have an async engine answer calls to its workers for all workers of all its replicas.

    Raises:
        UnsupportedUpstreamError: vLLM does not have the methods that we know.
    """
    verify(pins.DATA_PARALLEL)
    core = engine.engine_core

    async def collective_rpc(
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = partial(core._call_utility_async, "collective_rpc", method, timeout, args, kwargs)
        # vLLM's own returns the first replica's answer only (`patches.py`).
        replies = await asyncio.gather(*[call(engine=each) for each in core.core_engines])
        return [answer for reply in replies for answer in reply]

    patch(engine, collective_rpc=collective_rpc)


@contextmanager
def drawn_by(engine: AsyncLLM, replica: int | None) -> Iterator[None]:
    """Give an async engine's requests that are added meanwhile to one of its replicas; None leaves
    them to vLLM. The context may hold no `await`: another request would slip in.

    Symptom: vLLM spreads a group over its replicas, each of which encodes its images, and no answer
    names the replica that drew it.
    Upstream: ms-swift 4.6, infer_engine/vllm_engine.py: `VllmEngine._add_request` calls
    `AsyncLLM.generate` without its `data_parallel_rank`. Can go when it takes a rank.
    """
    if replica is None:
        yield
        return
    with replaced(engine, "generate", partial(engine.generate, data_parallel_rank=replica)):
        yield
