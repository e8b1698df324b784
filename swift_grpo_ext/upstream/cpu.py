"""Settings without which GRPO does not run where there is no accelerator.

Symptom: accelerate does not gather over several CPU ranks unless told that it runs on CPU
(ms-swift then fails an assertion); torch.distributed has no default backend there; vLLM's engine
core must live in the training process for the weights to be reached; vLLM reserves 4 GiB for
its KV cache or more; ms-swift trains float32 models under fp16 autocast.
Upstream: ms-swift 4.6, vLLM 0.32 (envs.py). What the user has set himself wins.
Can go when ms-swift makes these choices for CPU runs.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from swift_grpo_ext.upstream.accelerator import has_accelerator

CPU_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
CPU_TRAINING_ARGUMENTS = {"use_cpu": True, "fp16": False, "bf16": False}


def apply_cpu_settings(args: Any, given: Collection[str]) -> None:
    """Set what CPU runs need and the user has not set, on `args` and in the environment.

    Args:
        args: `swift rlhf`'s or `swift rollout`'s arguments, in the middle of their own set-up.
        given: the flags that stand on the command line.
    """
    if has_accelerator():
        return
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if args.ddp_backend is None:
        args.ddp_backend = "gloo"
    for name, value in CPU_TRAINING_ARGUMENTS.items():
        if hasattr(args, name) and name not in given:
            setattr(args, name, value)
