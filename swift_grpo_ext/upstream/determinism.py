"""`--full_determinism true`: training passes have the same bits in each run.

transformers' switch acts on the whole process. The sampler of a colocated vLLM engine has sums
without a deterministic form on CUDA, which raise then: `deterministic(False)` is for the engine.
"""

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
from swift_grpo_ext.upstream.patches import Moment, make, patch, repair

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import GradBucket, ProcessGroup
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")  # deterministic; the first costs no speed
ENVIRONMENT = {
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # transformers reads it
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
}


def prepare_process() -> None:
    """Set what libraries read when they start; called before a model is loaded."""
    os.environ.setdefault(CUBLAS, CUBLAS_VALUES[0])
    os.environ.update(ENVIRONMENT)
    make(leave_the_environment)


@repair(
    Moment.CALLED,
    symptom="A run with --full_determinism waits for each kernel, in every process that it "
    "starts, and cuBLAS has other settings than the user's, perhaps too late.",
    upstream="transformers 5.19, trainer_utils.py:154 (`enable_full_determinism`), called in "
    "trainer.py:420: sets `CUDA_LAUNCH_BLOCKING`, and `CUBLAS_WORKSPACE_CONFIG` once the "
    "model is loaded.",
    until="it leaves `CUDA_LAUNCH_BLOCKING` alone and sets the rest before CUDA is used",
    optional=True,
)
def leave_the_environment() -> None:
    """Have transformers' trainer set seeds and switches, and no variable of the environment."""
    from transformers import set_seed, trainer

    def enable_full_determinism(seed: int) -> None:
        set_seed(seed)
        _switch(on=True)

    patch(trainer, enable_full_determinism=enable_full_determinism)
    # Nothing reads what it has not written: to fill it would only cost time.
    patch(torch.utils.deterministic, fill_uninitialized_memory=False)


def batches_follow_arrival(*, is_async: bool) -> bool:
    """Return whether an engine's tokens depend on when requests arrive: on an accelerator the last
    bits of a sum depend on which requests share a step. vLLM 0.32's engine waits for all of them
    where it has no process of its own (v1/engine/core_client.py)."""
    is_invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
    waits_for_all = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" and not is_async
    return has_accelerator() and not is_invariant and not waits_for_all


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Use deterministic operations alone in a block, or whichever are fastest."""
    was_on = torch.are_deterministic_algorithms_enabled()
    _switch(on=on)
    try:
        yield
    finally:
        _switch(on=was_on)


def _switch(*, on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    # torch's switch does not reach cuDNN's choice of algorithms, which has two of its own.
    cudnn.deterministic, cudnn.benchmark = on, False


@contextmanager
def exact_unmerging(model: nn.Module) -> Iterator[None]:
    """Restore base weights after a block that merges adapters into them and takes them out again.

    Symptom: with LoRA, base weights are no longer the model's after an update of the engine, so
    that a resumed run, which loads them again, parts from the one that was not interrupted.
    Upstream: ms-swift 4.6, rlhf_trainers/rollout_mixin.py (`_move_full_model_to_vllm` and
    `_move_adapter_to_vllm`) has PEFT add adapters and subtract them, which rounds both. Can go when
    base weights are left alone, or copied back.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    weights = [weight for layer in layers for weight in layer.get_base_layer().parameters()]
    # In the host's memory: a colocated engine has most of an accelerator's.
    originals = [weight.data.to("cpu", copy=True) for weight in weights]
    try:
        yield
    finally:
        for weight, original in zip(weights, originals, strict=True):
            weight.data.copy_(original)


def sum_gradients_one_by_one(accelerator: Any) -> None:
    """Have data-parallel ranks sum each parameter's gradient alone, in every backward pass;
    accelerate's `accelerator` has not prepared the model yet.

    Symptom: with three ranks or more, the first gradients after a start are rounded otherwise than
    later ones, so that a resumed run parts from the one that was not interrupted.
    Upstream: torch 2.13, nn/parallel/distributed.py: gradients are summed over ranks as one piece
    at first, and in pieces of 25 MB from the second backward pass on. The place of a gradient in
    its piece decides the order of ranks in the sum. Can go when the pieces stay.
    """
    from accelerate.utils import DistributedDataParallelKwargs

    class SumsOneByOne(DistributedDataParallelKwargs):
        def register_comm_hook(self, model: DistributedDataParallel) -> None:
            # Without annotations: torch refuses those that are text, as this module's are.
            hook = lambda group, bucket: _sum_one_by_one(group, bucket)  # noqa: E731
            model.register_comm_hook(model.process_group, hook)

    if accelerator.ddp_handler is not None:
        accelerator.ddp_handler = SumsOneByOne(**asdict(accelerator.ddp_handler))


def _sum_one_by_one(group: ProcessGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    size, works = group.size(), []
    for gradient in bucket.gradients():
        gradient.div_(size)  # before the sum, as torch's own way
        works.append(distributed.all_reduce(gradient, group=group, async_op=True))
    futures = torch.futures.collect_all([work.get_future() for work in works])
    return futures.then(lambda _: bucket.buffer())
