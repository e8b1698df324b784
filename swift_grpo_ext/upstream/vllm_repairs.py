"""Repairs of vLLM, each with the symptom that it cures. A release without the names of a repair is
left as it is.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial, wraps
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import count
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from swift.utils import get_logger

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import verify
from swift_grpo_ext.upstream.patches import patch, repair

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger()


def repair_cpu_engine() -> None:
    """Repair what engines need without an accelerator. Call it before one is made."""
    serve_split_prompts()
    name_shared_memory_by_run()
    pack_experts_anew()
    keep_packed_convolutions()
    keep_plain_weights()
    leave_threads_unbound()
    return_routed_experts()


@repair(pins.SPLIT_PROMPTS)
def serve_split_prompts() -> None:
    """Put a request's generator aside for a step that computes only a part of its prompt; the token
    that is thrown away is drawn with the global generator.

    Symptom: `RuntimeError: CPU Generator does not use offset` ends the engine as soon as the prompt
    of a request with a seed does not fit into one step (`max_num_batched_tokens`).
    Upstream: vLLM 0.32, v1/worker/gpu_model_runner.py (`_bookkeeping_sync`) takes the noise of the
    thrown-away token back by moving the generator's offset, which CPU generators do not have.
    Can go when vLLM takes the noise back on CPU too.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, bookkeeping_sync = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    @wraps(sample)
    def _sample(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        if hasattr(self, "discard_request_mask"):
            discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        else:  # vLLM 0.11
            discarded = self.discard_request_indices.np[: self.num_discarded_requests]
        self._put_aside = {i: generators.pop(i) for i in discarded.tolist() if i in generators}
        return sample(self, *args, **kwargs)

    @wraps(bookkeeping_sync)
    def _bookkeeping_sync(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        try:
            return bookkeeping_sync(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(self._put_aside)
            self._put_aside = {}

    patch(CPUModelRunner, _sample=_sample, _bookkeeping_sync=_bookkeeping_sync)


@repair(pins.SHARED_MEMORY)
def name_shared_memory_by_run() -> None:
    """Make the rendezvous' port a part of the name of the ranks' shared memory, and take the name
    back as soon as all ranks have mapped it.

    Symptom: `create shm in SHMManager failed. errno: 17`, where two runs with colocated tensor
    parallelism start at the same moment, or one after another on the same port: the first one's
    memory stays in /dev/shm once its processes have ended (4 MB a rank).
    Upstream: vLLM 0.32, v1/worker/cpu_worker.py: the name is what follows the last colon of the
    rendezvous' address, `//` for every colocated engine's `env://`.
    Can go when vLLM's name differs from run to run and does not outlast it.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make_name, join = _CPUSHMDistributed.make_group_name, _CPUSHMDistributed._init_cpu_shm

    def make_group_name(communicator: CpuCommunicator) -> str:
        return f"{make_name(communicator)}-{os.environ.get('MASTER_PORT', '')}"

    @wraps(join)
    def _init_cpu_shm(self: _CPUSHMDistributed) -> int:
        memory = Path("/dev/shm", f"{self.group_name.lstrip('/')}_{self.communicator.rank}")
        memory.unlink(missing_ok=True)  # of a run on this port that was killed before it joined
        handle = join(self)  # returns after a barrier: all ranks have mapped all memory
        memory.unlink(missing_ok=True)
        return handle

    patch(
        _CPUSHMDistributed,
        make_group_name=staticmethod(make_group_name),
        _init_cpu_shm=_init_cpu_shm,
    )


@repair(pins.PACKED_EXPERTS)
def pack_experts_anew() -> None:
    """Pack the experts that an update has brought, as those that were loaded first.

    Symptom: after its first weight update a mixture of experts samples from other weights than the
    trainer's (0.21 nats a token, the tiny Qwen3-VL-MoE), and nothing fails.
    Upstream: vLLM 0.32, model_executor/layers/fused_moe/unquantized_fused_moe_method.py packs
    experts for the CPU's kernel when they are loaded first, and never again.
    Can go when vLLM packs the experts that an update brings.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as upstream

    setup_kernel = upstream.UnquantizedFusedMoEMethod._setup_kernel

    @wraps(setup_kernel)
    def _setup_kernel(
        self: Any, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor
    ) -> None:
        is_first = self.moe_kernel is None
        setup_kernel(self, layer, w13, w2)
        if is_first:
            self._packed = [layer.w13_weight]  # bare, the method would be this parameter's module
        elif w13 is not self._packed[0]:  # a reload loads into another, and copies into that one
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    patch(upstream.UnquantizedFusedMoEMethod, _setup_kernel=_setup_kernel)


@repair(pins.ROUTED_EXPERTS)
def return_routed_experts() -> None:
    """Let an engine return the experts that it chose without an accelerator too.

    Symptom: `AuxOutput Connector requires Model Runner V2` with `enable_return_routed_experts`.
    Upstream: vLLM 0.32: v1/worker/gpu/model_runner.py alone asks its connector what was captured;
    the runner of CPUs is a child of the first one. Can go when CPUs have the second.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    initialize_kv_cache = CPUModelRunner.initialize_kv_cache
    execute_model, sample_tokens = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    @wraps(initialize_kv_cache)
    def _initialize_kv_cache(
        self: CPUModelRunner, config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        initialize_kv_cache(self, config, *args, **kwargs)
        self._experts = None
        if self.vllm_config.aux_output_config.enabled:
            self._experts = get_aux_output_connector(self.model, self.vllm_config, config)

    @wraps(execute_model)
    def _execute_model(
        self: CPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        if self._experts is not None:
            self._experts.begin_step(scheduler_output.aux_output_connector_metadata)
        output = execute_model(self, scheduler_output, *args, **kwargs)
        if self._experts is not None and scheduler_output.total_num_scheduled_tokens:
            batch = self.input_batch
            counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
            self._step = SimpleNamespace(
                req_ids=list(batch.req_ids),
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
            )
        return output

    @wraps(sample_tokens)
    def _sample_tokens(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(self, *args, **kwargs)
        pending = self._experts and self._experts.prepare_output(self._step)
        if pending:  # not on a rank whose output nobody takes
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    patch(VllmConfig, _verify_aux_output_compatibility=lambda self: None)
    patch(
        CPUModelRunner,
        initialize_kv_cache=_initialize_kv_cache,
        execute_model=_execute_model,
        sample_tokens=_sample_tokens,
    )


@repair(pins.PACKED_CONVOLUTIONS)
def keep_packed_convolutions() -> None:
    """Leave a convolution's weight as it was packed, where layers are processed once more.

    Symptom: after the first weight update the gated delta nets of Qwen3.5 keep a shorter history
    for their convolutions (1.07 nats a token, the tiny model; found by its gap), on CPUs with
    AVX512-BF16.
    Upstream: ms-swift 4.6, rlhf_trainers/utils.py (`finish_vllm_weight_reload`) has vLLM process
    all layers behind each update; vLLM 0.32, model_executor/layers/utils.py takes a convolution's
    packed weight, which has two dimensions, for a linear layer's, packs it again and drops it.
    Can go when vLLM knows what it has packed.
    """
    from vllm.model_executor.layers import utils as upstream

    dispatch = upstream.dispatch_cpu_unquantized_gemm

    @wraps(dispatch)
    def dispatch_once(layer: torch.nn.Module, remove_weight: bool) -> None:
        is_convolution = layer.weight.ndim == 3
        if is_convolution or not getattr(layer, "has_packed_convolution", False):
            dispatch(layer, remove_weight)
            layer.has_packed_convolution = is_convolution and layer.weight.ndim == 2

    patch(upstream, dispatch_cpu_unquantized_gemm=dispatch_once)


@cache
def reloads_from_tensors() -> bool:
    """Return whether this vLLM's `reload_weights` takes tensors (0.11 reads files only)."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return "weights_iterator" in inspect.signature(GPUModelRunner.reload_weights).parameters


def reload_weights(model_runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace the weights of a CPU engine's model, by their checkpoint names."""
    if reloads_from_tensors():
        model_runner.reload_weights(weights_iterator=iter(weights))
    else:
        model_runner.model.load_weights(weights)


@cache
def keep_plain_weights() -> None:
    """Let the layers of vLLM 0.11 keep their weights, and multiply with these.

    Symptom: weights cannot be updated (`'Parameter' object has no attribute 'weight_loader'`).
    Upstream: vLLM 0.11, model_executor/layers/utils.py packs layers and drops the originals, and
    `reload_weights` reads files only. Can go with vLLM 0.11.
    """
    from vllm.model_executor.layers import utils as upstream

    if reloads_from_tensors():
        return

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return torch.nn.functional.linear(x, weight, bias)

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = multiply

    patch(upstream, dispatch_cpu_unquantized_gemm=keep)


@repair(pins.BOUND_THREADS)
def leave_threads_unbound() -> None:
    """Let threads run on all cores, where vLLM 0.11 would bind them.

    Symptom: `list index out of range`, where several ranks have engines on a machine with one NUMA
    node. Upstream: vLLM 0.11, v1/worker/cpu_worker.py. Can go with vLLM 0.11.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    patch(CPUWorker, _get_autobind_cpu_ids=lambda self, cpu_selector: "all")


@repair(pins.NAMED_MEDIA)
def name_media_by_request() -> None:
    """Name an image by its request instead of its content; a group's samples still share it.

    Symptom: rollouts of a model whose vision tower is trained see images as the tower of an earlier
    update saw them (0.06 nats a token, the tiny model; found by its gap).
    Upstream: vLLM 0.11, v1/core/encoder_cache_manager.py keeps what its tower made of an image;
    ms-swift resets that from vLLM 0.16 on. Can go with vLLM before 0.16.
    """
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.processor import Processor

    if hasattr(LLMEngine, "reset_encoder_cache"):
        return
    process, numbers = Processor.process_inputs, count()

    @wraps(process)
    def process_inputs(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        # ms-swift's own numbers of requests come again in each round.
        named = self._maybe_build_mm_uuids(f"{next(numbers)}-{request_id}", prompt)
        if named and isinstance(prompt, dict):
            prompt = {"multi_modal_uuids": named, **prompt}
        return process(self, request_id, prompt, *args, **kwargs)

    patch(Processor, process_inputs=process_inputs)


@repair(pins.PROCESSOR_COPIES)
def load_processors_uncopied() -> None:
    """While vLLM loads a processor, let a deep copy of the tokenizer that it hands over be that
    tokenizer. Nothing depends on it but time.

    Symptom: each processor that an engine loads takes 5 s longer (Qwen2.5-VL's 151,936 tokens, one
    core), and up to three are loaded before the first image is answered.
    Upstream: vLLM 0.32, transformers_utils/processor.py; transformers 5.19, processing_utils.py
    deep-copies its arguments five times. Can go when one of them does not.
    """
    from vllm.transformers_utils import processor as upstream

    get_processor = upstream.get_processor

    @wraps(get_processor)
    def load(*args: Any, **kwargs: Any) -> Any:
        own = getattr(kwargs.get("tokenizer"), "__dict__", None)
        if own is None or "__deepcopy__" in own:
            return get_processor(*args, **kwargs)
        own["__deepcopy__"] = lambda memo: kwargs["tokenizer"]
        try:
            return get_processor(*args, **kwargs)
        finally:
            del own["__deepcopy__"]

    patch(upstream, get_processor=load, cached_get_processor=lru_cache(load))


@cache
def leave_out_broken_plugins() -> None:
    """Have `VLLM_PLUGINS` name all plugins but one that vLLM 0.11 cannot load. Call it before an
    engine is made, or processes of vLLM's start.

    Symptom: `No module named 'vllm.model_executor.models.qwen3_5'` at the start of an engine.
    Upstream: ms-swift 4.6, model/models/qwen.py: vLLM calls `register_uembed_model` in each of its
    processes, which imports that model. Can go with vLLM 0.11.
    """
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
        connection.wait(sentinels)
        time.sleep(SECONDS_TO_CLOSE)  # for a worker that is closing it
        logger.error("A process of vLLM's engine has ended: this replica ends with it.")
        os._exit(1)

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

    Symptom: with `--vllm_data_parallel_size` above 1 weights that did not arrive at another replica
    than the first go unnoticed.
    Upstream: vLLM 0.32, v1/engine/core_client.py: `DPLBAsyncMPClient.call_utility_async` gathers
    all answers and returns the first. Can go when `collective_rpc` answers for all.

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
        of_replicas = await asyncio.gather(*[call(engine=each) for each in core.core_engines])
        return [answer for of_workers in of_replicas for answer in of_workers]

    engine.collective_rpc = collective_rpc


@contextmanager
def drawn_by(engine: AsyncLLM, replica: int | None) -> Iterator[None]:
    """Give an async engine's requests that are added meanwhile to one of its replicas; None leaves
    them to vLLM. The context may hold no `await`: another request would slip in.

    Symptom: no replica's weights can be probed, as no request can be given to a certain one.
    Upstream: ms-swift 4.6, infer_engine/vllm_engine.py: `VllmEngine._add_request` calls
    `AsyncLLM.generate` without its `data_parallel_rank`. Can go when it takes a rank.
    """
    if replica is None:
        yield
        return
    engine.generate = partial(engine.generate, data_parallel_rank=replica)
    try:
        yield
    finally:
        del engine.generate  # the class's own is there again
