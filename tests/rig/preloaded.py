"""Imports for all processes of the stack tests, and `multiprocessing`'s spawn by forking.

The zygote imports this module once, before it forks.
"""

import copy
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, spawn
from typing import Any

import numpy as np

MODULES = (
    "swift.pipelines.train.rlhf",
    "swift.rlhf_trainers.grpo_trainer",
    "swift.rlhf_trainers.gkd_trainer",
    "swift.infer_engine.grpo_vllm_engine",
    "vllm.engine.llm_engine",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.tokenization_mistral_common",
    "torch.distributed.run",
    "torch.distributed.tensor.experimental",
    "deepspeed",
    *("rapidfuzz.process", "sacrebleu", "scipy.io", "sympy.combinatorics"),
)
"""With their imports, all modules that take longer than 0.05 s. `swift.pipelines.infer.rollout` is
missing: a process is a server if it has loaded this module."""

_before = dict(os.environ)
for _module in MODULES:
    with suppress(ImportError):  # another release lacks it; processes then start more slowly
        importlib.import_module(_module)
# Each process that samples would run the compiler for it: a minute with torch's CUDA build.
importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
ENVIRONMENT = {k: v for k, v in os.environ.items() if _before.get(k) != v}
"""Variables that the imports have set."""


def be_as_if_new() -> None:
    """Redo what depends on this process: loggers that read the environment at import, and numpy's
    random state."""
    from swift.utils.logger import _is_local_master

    level = (os.environ.get("LOG_LEVEL") or "INFO").upper()
    for name in ("swift", "modelscope"):
        logging.getLogger(name).setLevel(level if _is_local_master() else logging.ERROR)
    np.random.seed()


# --- multiprocessing forks what it would spawn, from the fork server of `zygote.become` ---

_get_preparation_data, _prepare = spawn.get_preparation_data, spawn.prepare


def _with_environment(name: str) -> dict[str, Any]:
    return {**_get_preparation_data(name), "environment": dict(os.environ)}


def _prepare_with_environment(data: dict[str, Any]) -> None:
    if "environment" in data:
        os.environ.clear()
        os.environ.update(data["environment"])
        be_as_if_new()
    _prepare(data)


spawn.get_preparation_data, spawn.prepare = _with_environment, _prepare_with_environment
forkserver.ForkServer.ensure_running = lambda self: resource_tracker.ensure_running()
context.SpawnProcess._Popen = staticmethod(popen_forkserver.Popen)

# --- each process compiles no file again, and copies no vocabulary ---

sys.dont_write_bytecode = False  # PYTHONDONTWRITEBYTECODE made every process compile the plugin


def _without_vocabularies(deepcopy_one: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM and transformers copy a tokenizer some ten times a start, which took a third of a short
    training. Nobody changes the 150,000 words in it."""

    def copied(values: Any, *args: Any) -> Any:
        if len(values) > 10_000:
            first = next(iter(values.values() if isinstance(values, dict) else values))
            if isinstance(first, (int, str, tuple)):
                return values.copy()
        return deepcopy_one(values, *args)

    return copied


for _type in (dict, list):
    _table: Any = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    _table[_type] = _without_vocabularies(_table[_type])
gc.collect()
gc.freeze()  # pages stay shared
