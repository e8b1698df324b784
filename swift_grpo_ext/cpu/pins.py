"""All names of ms-swift and vLLM that only a machine without an accelerator needs, as those of
`upstream/pins.py`."""

from swift_grpo_ext.upstream.pins import read_table

NEEDED = read_table("""
swift.rlhf_trainers.utils
    finish_vllm_weight_reload: vllm_model model_config target_device
vllm.v1.worker.gpu_model_runner:GPUModelRunner
    reload_weights: self weights_iterator weights_path is_checkpoint_format | self
vllm.distributed.utils:StatelessProcessGroup
    (): rank world_size store
swift.pipelines.infer.rollout
    PyNcclCommunicator
""")
SPLIT_PROMPTS = read_table("""
vllm.v1.worker.cpu_model_runner:CPUModelRunner
    _bookkeeping_sync: self scheduler_output sampler_output logits hidden_states
        num_scheduled_tokens
    _sample: self logits spec_decode_metadata
""")
SHARED_MEMORY = read_table("""
vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed
    _init_cpu_shm: self
    make_group_name: communicator
""")
PACKED_EXPERTS = read_table("""
vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod
    _init_moe_kernel: self layer
    _setup_kernel: self layer w13 w2
""")
ROUTED_EXPERTS = read_table("""
vllm.engine.arg_utils:EngineArgs
    create_engine_config: self
vllm.config:VllmConfig
    _verify_aux_output_compatibility: self
vllm.distributed.aux_output_connector.worker
    get_aux_output_connector: model vllm_config kv_cache_config
vllm.distributed.aux_output_connector.worker:PendingAuxOutput
    enqueue_cpu_copy: self num_sampled num_rejected
    process_output: self
vllm.v1.worker.cpu_model_runner:CPUModelRunner
    initialize_kv_cache: self kv_cache_config
    execute_model: self scheduler_output
    sample_tokens: self grammar_output
""")
PACKED_CONVOLUTIONS = read_table("""
vllm._custom_ops
    causal_conv1d_weight_pack
""")
PLAIN_WEIGHTS = read_table("""
vllm.model_executor.layers.utils
    dispatch_cpu_unquantized_gemm: layer remove_weight
""")
BOUND_THREADS = read_table("""
vllm.v1.worker.cpu_worker:CPUWorker
    _get_autobind_cpu_ids: self cpu_selector
""")

OPTIONAL = {
    "prompts longer than a step, with seeds, on CPU": SPLIT_PROMPTS,
    "colocated tensor parallelism of two runs at once, on CPU": SHARED_MEMORY,
    "weight updates of experts, on CPU": PACKED_EXPERTS,
    "experts of a rollout, on CPU": ROUTED_EXPERTS,
}
"""Features that a release without these names goes without."""
