"""`--full_determinism true`: makes training passes bitwise reproducible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.backends import cudnn

from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.patches import make, patch, repair

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import GradBucket, ProcessGroup
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")  # the deterministic values; the first costs no speed
ENVIRONMENT = {
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # read by transformers
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
}


def prepare_process() -> None:
    """Set the variables that libraries read when they start. Call it before loading a model."""
    os.environ.setdefault(CUBLAS, CUBLAS_VALUES[0])
    os.environ.update(ENVIRONMENT)
    make(leave_the_environment)


@repair(optional=True)
def leave_the_environment() -> None:
    """Have transformers' trainer set seeds and torch's switches, but no environment variables.

    Symptom: with --full_determinism, all processes of a run wait for each kernel, and the user's
    cuBLAS settings are overwritten, possibly too late.
    Upstream: transformers 5.19, trainer_utils.py:154 (`enable_full_determinism`), called in
    trainer.py:420: sets `CUDA_LAUNCH_BLOCKING`, and sets `CUBLAS_WORKSPACE_CONFIG` after the model
    is loaded. Can go when it leaves `CUDA_LAUNCH_BLOCKING` alone and sets the rest before CUDA is
    used.
    """
    from transformers import set_seed, trainer

    def enable_full_determinism(seed: int) -> None:
        set_seed(seed)
        _switch(on=True)

    patch(trainer, enable_full_determinism=enable_full_determinism)
    # Filling uninitialized memory only costs time: no code reads memory before it writes it.
    patch(torch.utils.deterministic, fill_uninitialized_memory=False)


def batches_follow_arrival(*, is_async: bool) -> bool:
    """Return whether an engine's tokens depend on when requests arrive."""
    # On an accelerator, the last bits of sums depend on the requests that share a step.
    is_invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
    # An in-process engine starts when all requests are there (vLLM 0.32, v1/engine/core_client.py).
    waits_for_all = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" and not is_async
    return has_accelerator() and not is_invariant and not waits_for_all


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Switch deterministic operations on or off within the block."""
    # transformers' switch is on for the whole process. On CUDA, the sampler of a colocated engine
    # has sums without a deterministic form, which would raise: it runs with the switch off.
    was_on = torch.are_deterministic_algorithms_enabled()
    _switch(on=on)
    try:
        yield
    finally:
        _switch(on=was_on)


def _switch(*, on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    # cuDNN's choice of algorithms has two switches of its own.
    cudnn.deterministic, cudnn.benchmark = on, False


@contextmanager
def exact_unmerging(model: nn.Module) -> Iterator[None]:
    """Restore base weights after a block that merges adapters into them and unmerges them.

    Symptom: with LoRA, an update of the engine changes base weights slightly. A resumed run, which
    loads the original ones, diverges from the uninterrupted run.
    Upstream: ms-swift 4.6, rlhf_trainers/rollout_mixin.py (`_move_full_model_to_vllm` and
    `_move_adapter_to_vllm`) has PEFT add adapters and subtract them; both steps round. Can go when
    base weights are left alone, or copied back.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    weights = [weight for layer in layers for weight in layer.get_base_layer().parameters()]
    # In host memory: a colocated engine occupies most of the accelerator's.
    originals = [weight.data.to("cpu", copy=True) for weight in weights]
    try:
        yield
    finally:
        for weight, original in zip(weights, originals, strict=True):
            weight.data.copy_(original)


def sum_gradients_one_by_one(accelerator: Any) -> None:
    """Make data-parallel ranks sum each parameter's gradient on its own, in every backward pass.
    Call it before accelerate's `accelerator` prepares the model.

    Symptom: with three or more ranks, the first gradients after a start round differently from
    later ones, so that a resumed run diverges from the uninterrupted run.
    Upstream: torch 2.13, nn/parallel/distributed.py: the first backward pass sums all gradients in
    one bucket, later passes in buckets of 25 MB. The offset of a gradient in its bucket determines
    the order of ranks in its sum. Can go when the buckets stay the same.
    """
    from accelerate.utils import DistributedDataParallelKwargs

    class SumsOneByOne(DistributedDataParallelKwargs):
        def register_comm_hook(self, model: DistributedDataParallel) -> None:
            # A lambda has no annotations: torch rejects this module's, which are strings.
            hook = lambda group, bucket: _sum_one_by_one(group, bucket)  # noqa: E731
            model.register_comm_hook(model.process_group, hook)

    if accelerator.ddp_handler is not None:
        accelerator.ddp_handler = SumsOneByOne(**asdict(accelerator.ddp_handler))


def _sum_one_by_one(group: ProcessGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    size, works = group.size(), []
    for gradient in bucket.gradients():
        gradient.div_(size)  # before the sum, like torch
        works.append(distributed.all_reduce(gradient, group=group, async_op=True))
    futures = torch.futures.collect_all([work.get_future() for work in works])
    return futures.then(lambda _: bucket.buffer())
