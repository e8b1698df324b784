"""Repairs of vLLM's engines without an accelerator."""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair
from swift_grpo_ext.weights.update import plain_name


@repair(PatchPhase.ENGINE, PatchPhase.WORKER, optional=True)
def serve_split_prompts() -> None:
    """Hide a request's generator during steps that read only a part of its prompt: vLLM samples and
    discards a token in them, and would rewind the generator.

    Symptom: `RuntimeError: CPU Generator does not use offset` ends the engine as soon as the prompt
    of a request with a seed does not fit into one step (`max_num_batched_tokens`).
    Upstream: vLLM 0.32, v1/worker/gpu_model_runner.py (`_bookkeeping_sync`) rewinds the generator
    after the discarded token by its offset, which CPU generators do not have. Can go when vLLM
    rewinds generators on CPU too.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, bookkeeping_sync = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    @wraps(sample)
    def _sample(self: CPUModelRunner, *args: object, **kwargs: object) -> Any:
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        self._set_aside = {i: generators.pop(i) for i in discarded.tolist() if i in generators}
        return sample(self, *args, **kwargs)

    @wraps(bookkeeping_sync)
    def _bookkeeping_sync(self: CPUModelRunner, *args: object, **kwargs: object) -> Any:
        try:  # vLLM rewinds generators here
            return bookkeeping_sync(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(self._set_aside)
            self._set_aside = {}

    patch(CPUModelRunner, _sample=_sample, _bookkeeping_sync=_bookkeeping_sync)


@repair(PatchPhase.ENGINE, PatchPhase.WORKER, optional=True)
def name_shared_memory_by_run() -> None:
    """Add the rendezvous port to the name of the ranks' shared memory, and unlink the memory as
    soon as all ranks have mapped it.

    Symptom: `create shm in SHMManager failed. errno: 17`, if two runs with colocated tensor
    parallelism start at the same moment, or one after another on the same port: the first run's
    memory stays in /dev/shm after its processes have ended (4 MB a rank).
    Upstream: vLLM 0.32, v1/worker/cpu_worker.py: the name is the part after the last colon of the
    rendezvous address, which is `//` for every colocated engine (`env://`). Can go when vLLM's name
    is unique to a run and removed at its end.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make_name, join = _CPUSHMDistributed.make_group_name, _CPUSHMDistributed._init_cpu_shm

    def make_group_name(communicator: Any) -> str:
        return f"{make_name(communicator)}-{os.environ.get('MASTER_PORT', '')}"

    @wraps(join)
    def _init_cpu_shm(self: _CPUSHMDistributed) -> int:
        memory = Path("/dev/shm", f"{self.group_name.lstrip('/')}_{self.communicator.rank}")
        memory.unlink(missing_ok=True)  # left by a run on this port that was killed before joining
        handle = join(self)  # returns after a barrier: all ranks have mapped all memory
        memory.unlink(missing_ok=True)
        return handle

    patch(_CPUSHMDistributed, make_group_name=staticmethod(make_group_name))
    patch(_CPUSHMDistributed, _init_cpu_shm=_init_cpu_shm)


@repair(PatchPhase.ENGINE, PatchPhase.WORKER, optional=True)
def repack_experts() -> None:
    """Have vLLM pack a mixture of experts again after each weight update.

    Symptom: after the first weight update, a mixture of experts silently samples from other weights
    than the trainer's (0.21 nats a token, the tiny Qwen3-VL-MoE).
    Upstream: vLLM 0.32, model_executor/layers/fused_moe/unquantized_fused_moe_method.py packs
    experts for the CPU kernel at the first load only. Can go when vLLM packs updated experts too.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as upstream

    setup_kernel = upstream.UnquantizedFusedMoEMethod._setup_kernel

    @wraps(setup_kernel)
    def _setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_first = self.moe_kernel is None
        setup_kernel(self, layer, w13, w2)
        if is_first:
            self._packed = [layer.w13_weight]  # in a list: torch must not register the parameter
        elif w13 is not self._packed[0]:  # a reload loads into another tensor, then copies back
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    patch(upstream.UnquantizedFusedMoEMethod, _setup_kernel=_setup_kernel)


@repair(PatchPhase.ENGINE, PatchPhase.WORKER, optional=True)
def return_routed_experts() -> None:
    """Have the CPU runner return experts like the V2 runner, without async scheduling.

    Symptom: `AuxOutput Connector requires Model Runner V2` with `enable_return_routed_experts`.
    Upstream: vLLM 0.32, v1/worker/gpu/model_runner.py: only this V2 runner reads the captured
    experts from its connector; the CPU runner derives from V1. Can go when CPUs have the V2 runner.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    create = EngineArgs.create_engine_config

    @wraps(create)
    def create_engine_config(self: EngineArgs, *args: object, **kwargs: object) -> VllmConfig:
        if self.enable_return_routed_experts:
            self.async_scheduling = False  # else the next step begins before experts are read
        return create(self, *args, **kwargs)

    initialize_kv_cache = CPUModelRunner.initialize_kv_cache
    execute_model, sample_tokens = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    @wraps(initialize_kv_cache)
    def _initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize_kv_cache(self, kv_cache_config, *args, **kwargs)
        self._experts = None
        if self.vllm_config.aux_output_config.enabled:
            self._experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    @wraps(execute_model)
    def _execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._experts is not None:
            self._experts.begin_step(scheduler_output.aux_output_connector_metadata)
        output = execute_model(self, scheduler_output, *args, **kwargs)
        if self._experts is not None and scheduler_output.total_num_scheduled_tokens:
            batch = self.input_batch
            counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
            self._step = SimpleNamespace(  # the attributes of V2's batch that the connector reads
                req_ids=list(batch.req_ids),
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
            )
        return output

    @wraps(sample_tokens)
    def _sample_tokens(self: CPUModelRunner, *args: object, **kwargs: object) -> Any:
        output = sample_tokens(self, *args, **kwargs)
        pending = self._experts and self._experts.prepare_output(self._step)
        if pending:  # None on ranks without an output
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    patch(EngineArgs, create_engine_config=create_engine_config)
    patch(VllmConfig, _verify_aux_output_compatibility=lambda self: None)  # it rejects V1
    patch(CPUModelRunner, initialize_kv_cache=_initialize_kv_cache)
    patch(CPUModelRunner, execute_model=_execute_model, sample_tokens=_sample_tokens)


@repair(PatchPhase.ENGINE, PatchPhase.WORKER, optional=True)
def keep_packed_convolutions() -> None:
    """Have vLLM pack the weight of a convolution only once.

    Symptom: after the first weight update, the gated delta nets of Qwen3.5 keep a shorter history
    for their convolutions (1.07 nats a token, the tiny model), on CPUs with AVX512-BF16.
    Upstream: ms-swift 4.6, rlhf_trainers/utils.py (`finish_vllm_weight_reload`) has vLLM process
    all layers after each update; vLLM 0.32, model_executor/layers/utils.py treats a packed
    convolution weight, which has two dimensions, as a linear layer's: it packs the weight again and
    drops it. Can go when vLLM does not pack a weight twice.
    """
    from vllm.model_executor.layers import utils as upstream

    dispatch = upstream.dispatch_cpu_unquantized_gemm

    @wraps(dispatch)
    def dispatch_once(layer: torch.nn.Module, remove_weight: bool) -> None:
        is_convolution = layer.weight.ndim == 3  # a packed one has two dimensions
        if is_convolution or not getattr(layer, "has_packed_convolution", False):
            dispatch(layer, remove_weight)
            layer.has_packed_convolution = is_convolution and layer.weight.ndim == 2

    patch(upstream, dispatch_cpu_unquantized_gemm=dispatch_once)


@repair(PatchPhase.TRAINER)
def reload_colocated() -> None:
    """Have ms-swift's trainer reload its colocated engine's model. (ms-swift's
    `finish_vllm_weight_reload` processes a tied head later.)

    Symptom: a colocated engine fails at the first weight update: its layers have packed their
    weights, which `load_weights` cannot fill.
    Upstream: vLLM 0.32, model_executor/layers/utils.py (`dispatch_cpu_unquantized_gemm`) packs
    weights and drops the originals; ms-swift 4.6, rlhf_trainers/rollout_mixin.py calls
    `load_weights`. Can go when vLLM's `load_weights` fills packed layers.
    """
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

    load = RolloutTrainerMixin._load_state_dict_to_vllm

    @wraps(load)
    def _load_state_dict_to_vllm(self: Any, state_dict: dict[str, torch.Tensor]) -> None:
        if self.vllm_mode != "colocate":  # `receiver.py` reloads on a server
            load(self, state_dict)
            return
        # In this process: `VLLM_ENABLE_V1_MULTIPROCESSING=0` (`settings.py`).
        model_runner = self.engine.inner_model_executor.driver_worker.worker.model_runner
        weights = ((plain_name(name), tensor) for name, tensor in state_dict.items())
        model_runner.reload_weights(weights_iterator=weights)

    patch(RolloutTrainerMixin, _load_state_dict_to_vllm=_load_state_dict_to_vllm)
