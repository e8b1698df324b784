"""What processes of these tests import sooner or later, and how they spawn others by forking.

The zygote imports this module once, before it forks.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from contextlib import suppress
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, spawn
from typing import Any

import numpy as np

MODULES = (
    "swift.pipelines.train.rlhf",
    "swift.rlhf_trainers.grpo_trainer",
    "vllm.v1.worker.cpu_worker",
    "transformers.tokenization_mistral_common",
    "deepspeed",
)
"""They bring all that takes longer than 0.05 s to import. `swift.pipelines.infer.rollout` is not
among them: whether it is loaded tells a server from a training."""

_before = dict(os.environ)
for _module in MODULES:
    with suppress(ImportError):  # of another release; it is slower then
        importlib.import_module(_module)
# What a compiler is asked in each process that samples: a minute beside torch's CUDA build.
importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
ENVIRONMENT = {k: v for k, v in os.environ.items() if _before.get(k) != v}
"""What imports have set."""


def be_as_if_new() -> None:
    """Make up for what imports read of the environment, and what is not the same in two
    processes."""
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
gc.collect()
gc.freeze()  # pages stay shared
