"""Repairs of weight updates: timeouts of the process group that sends weights from a trainer to
`swift rollout`, and adapters that keep their type while they are merged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar

from swift.utils import get_logger
from torch import nn

from swift_grpo_ext.upstream.patches import patch, replaced
from swift_grpo_ext.upstream.threads import in_thread

BARRIER_SECONDS = 30.0  # vLLM's default timeout of a barrier, which detects a killed replica
MARGIN = 1.1  # `run_with_timeout` gives up after this many times the timeout

T = TypeVar("T")

logger = get_logger()


def run_with_timeout(seconds: float, work: Callable[[], T], rank: int) -> T:
    """Return the result of `work`; raise `TimeoutError` if it takes longer."""
    # Members of torch's `TCPStore` wait forever for a host (rank 0) that has stopped. The host has
    # the store's own timeouts: an abandoned thread would keep the port that the next group needs.
    if rank == 0:
        return work()
    outcome = in_thread(work)
    try:
        return outcome.result(MARGIN * seconds)
    except FutureTimeoutError as e:
        if outcome.done():  # `work` itself raised it
            raise
        raise TimeoutError(f"the weights' group has not answered for {seconds:g} s") from e


@contextmanager
def bounded_rendezvous(module: Any, timeout: float) -> Iterator[None]:
    """Limit how long ms-swift's `module` waits for the other members of a weight group.

    Symptom: if the host of the weights' group has stopped, all others wait forever.
    Upstream: vLLM 0.32, distributed/utils.py (`StatelessProcessGroup`): creating one waits 300 s
    and a barrier 30 s, but only the host keeps to it; ms-swift 4.6 passes no timeout. Can go when
    each wait of the group keeps to its timeout.
    """
    upstream = module.StatelessProcessGroup
    seconds = max(int(timeout), 1)  # the store takes whole seconds
    barrier_seconds = min(timeout, BARRIER_SECONDS)

    def create(*args: Any, **kwargs: Any) -> Any:
        rank = kwargs.get("rank", 0)
        make = partial(upstream.create, *args, **kwargs, store_timeout=seconds)
        group = run_with_timeout(seconds, make, rank)
        group.timeout = timeout  # read by `cpu/gloo.py`
        barrier = partial(group.barrier, timeout=barrier_seconds)
        patch(group, barrier=partial(run_with_timeout, barrier_seconds, barrier, rank))
        return group

    with replaced(module, "StatelessProcessGroup", SimpleNamespace(create=create)):
        yield


@contextmanager
def bounded_broadcasts(communicators: Sequence[Any], timeout: float) -> Iterator[None]:
    """Set the timeout of communicators, in seconds; log longer waits of one without it (NCCL)."""
    for communicator in communicators:
        if group := getattr(communicator, "group", None):
            group.timeout = timeout
    if all(getattr(communicator, "disabled", True) for communicator in communicators):
        yield
        return
    # NCCL waits forever for a dead rank, unless another thread aborts the communicator. No GPU has
    # run such an abort: the wait is only logged.
    text = (
        f"Weights were not taken within {timeout:g} s (--rollout_timeout). NCCL waits forever "
        "if a replica has ended: see the log of `swift rollout`, end this training, and resume "
        "it from its last checkpoint."
    )
    timer = threading.Timer(timeout, logger.error, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def adapters_keep_their_type() -> Iterator[None]:
    """Let a block that merges LoRA adapters move them to another device, but to no other type.

    Symptom: with LoRA on a base model in 16 bits, the first weight update casts the float32
    adapters to 16 bits. Data-parallel ranks then no longer average their gradients.
    Upstream: ms-swift 4.6, rlhf_trainers/utils.py (`patch_lora_merge`, `patch_lora_unmerge`) calls
    PEFT's `_move_adapter_to_device_of_base_layer`, which also casts. torch gives a parameter of
    another type a new gradient accumulator, and DDP's hooks stay at the old one
    (torch/csrc/autograd/variable.cpp, `set_data`). Can go when ms-swift moves the device alone.
    """
    from peft.tuners.lora import layer as peft_layers

    def move(layer: Any, adapter_name: str, device: Any = None) -> None:
        base = layer.get_base_layer()
        # Quantized weights are buffers. ZeRO-3 has gathered the weights before.
        device = device or next(chain(base.parameters(), base.buffers())).device
        for name in (*layer.adapter_layer_names, *layer.other_param_names):
            values = getattr(layer, name, None)
            if isinstance(values, (nn.ModuleDict, nn.ParameterDict)) and adapter_name in values:
                values[adapter_name] = values[adapter_name].to(device)

    with ExitStack() as stack:
        # Older releases of PEFT have no wrapper of experts, which has a method of its own.
        for name in {"LoraLayer", "ParamWrapper"} & vars(peft_layers).keys():
            owner, method = getattr(peft_layers, name), "_move_adapter_to_device_of_base_layer"
            stack.enter_context(replaced(owner, method, move))
        yield
