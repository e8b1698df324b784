"""Sets defaults for GRPO without an accelerator. The user's own settings win.

They can go when ms-swift (4.6) and vLLM (0.32, envs.py) make these choices for CPU runs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from swift_grpo_ext import cpu
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair

if TYPE_CHECKING:
    from swift.arguments import BaseArguments

KV_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
CPU_ENVIRONMENT = {
    # Without it, accelerate does not gather over several CPU ranks: ms-swift fails an assertion.
    "ACCELERATE_USE_CPU": "true",
    # vLLM would take 0.9 of the machine's memory.
    KV_CACHE_GIB: "1",
    # Weights do not reach an engine core in another process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A torch for GPUs includes NCCL, with which vLLM fails ("unhandled cuda error").
    "VLLM_NCCL_SO_PATH": "none",
}
# ms-swift would train float32 models under fp16 autocast.
CPU_TRAINING_ARGUMENTS = {"use_cpu": True, "fp16": False, "bf16": False}
PRIORITY = 41  # of a location handler in `torch.load`; torch's own have 10 to 30

# By default, glibc returns every large buffer to the system, and faults it in again page by page:
# 4.0 s a step instead of 2.5.
KEEP_FREED_MEMORY = {
    # glibc's environment variable: (number of the option in mallopt, value)
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, -1),
    "MALLOC_TOP_PAD_": (-2, 256 * 1024**2),
}


def apply_cpu_settings(args: BaseArguments, given: Collection[str]) -> None:
    """Set defaults for CPU runs on `args` and in the environment; the user's settings stay."""
    if has_accelerator():
        return
    cpu.register()
    sizes_cache = "kv_cache_memory_bytes" in (getattr(args, "vllm_engine_kwargs", None) or {})
    for name, value in CPU_ENVIRONMENT.items():
        if not (sizes_cache and name == KV_CACHE_GIB):  # the variable would win over the setting
            os.environ.setdefault(name, value)
    # torchrun sets RANK. Without torchrun, accelerate would wait for a group if given a backend.
    if args.ddp_backend is None and "RANK" in os.environ:
        args.ddp_backend = "gloo"
    for name, setting in CPU_TRAINING_ARGUMENTS.items():
        if hasattr(args, name) and not getattr(args, name) and name not in given:
            setattr(args, name, setting)
    # Gloo's threads may outlive the interpreter, and then abort the rank ("terminate called without
    # an active exception", pytorch issue 190489). Finalizers run last in, first out: vLLM's,
    # registered later, leaves its own groups first.
    weakref.finalize(sys.modules[__name__], _leave_group)
    if platform.libc_ver()[0] == "glibc":
        # mallopt is for this process, the environment for its children.
        libc = ctypes.CDLL(None)
        for variable, (option, number) in KEEP_FREED_MEMORY.items():
            if variable not in os.environ:
                os.environ[variable] = str(number)
                libc.mallopt(option, number)


@repair(PatchPhase.REGISTRATION)
def count_no_devices() -> None:
    """Skip ms-swift's check of the number of devices.

    Symptom: `swift rollout` with several replicas finds too few devices.
    Upstream: ms-swift 4.6, arguments/rollout_args.py (`_check_device_count`) counts accelerators;
    replicas on CPU share cores and memory. Can go when `_check_device_count` skips CPU runs.
    """
    from swift.arguments import RolloutArguments

    patch(RolloutArguments, _check_device_count=lambda self: None)


@repair(PatchPhase.TRAINING)
def load_onto_ranks() -> None:
    """Make `torch.load` accept the locations of CPU ranks, such as `cpu:0`.

    Symptom: a resumed rank fails, because torch has no location `cpu:0`.
    Upstream: transformers 4.57 to 5.16, trainer.py (`_load_optimizer_and_scheduler`). Can go when
    transformers before 5.19 is no longer supported.
    """
    torch.serialization.register_package(
        PRIORITY,
        lambda storage: None,
        lambda storage, location: storage if location.startswith("cpu:") else None,
    )


def _leave_group() -> None:
    """Leave torch's groups and join gloo's threads."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    # A group joins its threads when it is deleted, and they may need the GIL. Collecting DDP's
    # reducer would delete the group with the GIL held (a deadlock): keep the groups until then.
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    gc.collect()
    del groups  # dropping the last reference releases the GIL
