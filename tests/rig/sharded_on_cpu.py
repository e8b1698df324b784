"""A plugin for tests: lets FSDP2 and DeepSpeed run without an accelerator, and makes chunks of
logits so short that a pass has several."""

import os
from typing import Any

import torch

from swift_grpo_ext.logits.shim import LogitsShim

LogitsShim.chunk_size = 16


def finished(gather: Any) -> Any:
    """Return the collective, made to wait for its end even if it is asynchronous."""

    def wait(*args: Any, **kwargs: Any) -> Any:
        if (work := gather(*args, **kwargs)) is not None:
            work.wait()
        return work

    return wait


if "ACCELERATE_TORCH_DEVICE" in os.environ:  # sharded trainings have it
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # accelerate 1.15 shards over accelerators alone, and would choose their backend.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
if os.environ.get("DS_ACCELERATOR") == "cpu":
    import deepspeed.comm.torch as comm

    # The shared-memory operator would be compiled; gloo serves.
    comm.build_shm_op = lambda: None
    # DeepSpeed 0.18 waits for the last of several gathers, as CUDA streams allow; gloo runs them
    # side by side, and a large weight would be read before it is there (partition_parameters.py,
    # `_allgather_params_coalesced`: log-probabilities and gradient norms at random).
    # torch 2.13's gloo makes the output's views under autograd: ZeRO-2 then cannot write to them.
    for name in ("all_gather_into_tensor", "_all_gather_base"):
        gather = getattr(torch.distributed, name, None)
        if gather is not None:
            setattr(torch.distributed, name, torch.no_grad()(finished(gather)))
