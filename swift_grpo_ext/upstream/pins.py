"""Names of ms-swift, vLLM and others that we call, or change for a block, with their signatures.

Methods that our classes override, and what `patches.py` replaces, are held against upstream by
themselves (`contract.py`). Each table is verified once, where its names are about to be used:
`COMMAND_LINE` in `register()`, `TRAINER` before the trainer is made, `ENGINE` and `SERVER` when the
rollout engine is installed, which needs vLLM, `DATA_PARALLEL` when such an engine is made.

A table has a line for each module, or class of it (`module:Class`). Indented below stand its names,
those that share their parameters on one line: `names: parameters`. `()` is the class itself; a name
without parameters needs only be there.
"""

from __future__ import annotations

import re

from swift_grpo_ext.upstream.contract import Pin


def read_table(table: str) -> tuple[Pin, ...]:
    """Return the pins of a table (this module's docstring has its form)."""
    pins, module, owner = list[Pin](), "", ""
    for line in re.sub(r"\n {8,}", " ", table).strip().splitlines():  # continued lines joined
        if not line.startswith(" "):
            module, _, owner = line.partition(":")
            continue
        names, _, parameters = line.partition(":")
        for name in names.split():
            path = ".".join(part for part in (owner, name) if part not in ("", "()"))
            pins.append(Pin(module, path, tuple(parameters.split()) or None))
    return tuple(pins)


COMMAND_LINE = read_table("""
swift.dataset:DatasetLoader
    load: self dataset_syntax dataset_meta use_hf
swift.dataset:RowPreprocessor
    batched_preprocess: self batched_row strict ignore_max_length_error
    rows_to_batched: rows
swift.utils.utils
    _patch_get_type_hints
swift.trainers:TrainerFactory
    TRAINER_MAPPING TRAINING_ARGS_MAPPING
swift.callbacks:TrainerCallback
    (): args trainer
    on_train_begin on_optimizer_step on_step_end on_prediction_step on_train_end:
        self args state control
""")

TRAINER = read_table("""
swift.rlhf_trainers:GRPOTrainer
    (): model ref_model reward_model reward_funcs _args kwargs
    _add_prompt_id_to_inputs: self samples
    _get_per_token_logps_and_entropies: self model model_inputs grpo_batch
    _get_request_config: self
    _template_context: self template
    resample_encode_failed_inputs: self inputs
swift.rlhf_trainers:GKDTrainer
    load_teacher_model_context: self
swift.rlhf_trainers.gkd_loss
    _align_vocab: student_logits teacher_logits
    jsd_loss: s_logits t_logits beta
swift.rlhf_trainers.vllm_client:VLLMClient
    init_communicator: self device
    update_adapter_flattened_param: self peft_config metadatas flattened_tensor
    update_adapter_param: self peft_config lora_params
swift.rl_core.data:OnPolicySample
    from_row: cls row
    to_infer_request: self include_extra
    build_teacher_view to_reward_row to_teacher_template_dict: self
swift.rlhf_trainers.base_rollout_mixin:BaseRolloutTrainerMixin
    sample_cls
swift.rlhf_trainers.utils:FlattenedTensorBucket
    (): named_tensors flattened_tensor metadata
swift.rlhf_trainers.utils
    encode_sample: sample template
    build_rollout_logps: rollout_logprobs_list completion_mask device
    collate_to_grpo_micro_batch: samples template
    revert_runtime_names_to_checkpoint: model state_dict
swift.infer_engine.infer_engine:InferEngine
    _get_toolcall: self response template_inputs
swift.rollout.multi_turn:MultiTurnScheduler
    check_finished on_turn_end step: self infer_request response_choice current_turn
    get_response_token_data: self infer_request response_choice
    on_trajectory_start: self requests
swift.template.base:Template
    _add_dynamic_eos: input_ids labels loss_scale suffix_tokens_id
    _get_response_prefix: self inputs
    _replace_image_tags: inputs
    decode_generate_ids: self generate_ids is_finished first_token template_inputs
swift.template.template_inputs:StdTemplateInputs
    remove_messages_media: messages
swift.template.vision_utils
    load_file: path
    load_video_hf: videos
""")

ENGINE = read_table("""
swift.infer_engine.vllm_engine:VllmEngine
    _format_prompt_logprobs: prompt_logprobs
    inner_model_executor
swift.template.base:Template
    _truncate: self input_ids labels encoded truncation_strategy
vllm.lora.worker_manager:LRUCacheWorkerLoRAManager
    add_adapter: self lora_request
""")

POSITIONS = read_table("""
vllm.v1.engine.input_processor:InputProcessor
    process_inputs: self request_id prompt params
vllm.model_executor.model_loader.utils
    get_model_cls: model_config
vllm.model_executor.models.interfaces:SupportsMRoPE
    get_mrope_input_positions: self input_tokens mm_features
""")

SERVER = read_table("""
swift.pipelines.infer.rollout
    llm_worker: args data_parallel_rank master_port connection
    llm_worker_entry: args kwargs
    InitCommunicatorRequest
vllm.v1.engine.exceptions
    EngineDeadError
vllm.distributed.utils:StatelessProcessGroup
    barrier: self timeout
swift.rollout.multi_turn:MultiTurnScheduler
    async_infer: self infer_requests request_config
    run: self infer_request request_config
swift.pipelines.infer.rollout:StatelessProcessGroup
    create: host port rank world_size data_expiration_seconds store_timeout
swift.utils:SafeMediaPath
    check: cls path
swift.utils:SafeUrlFetcher
    check_url: cls url
    read: cls url kwargs
swift.pipelines.infer.deploy:SwiftDeploy
    _materialize_media: value media_type temp_dir
swift.template.vision_utils
    load_file: path
""")
"""Names that `swift rollout` is extended at."""

DATA_PARALLEL = read_table("""
vllm.v1.engine.async_llm:AsyncLLM
    generate: self prompt sampling_params request_id
vllm.v1.engine.core_client:DPLBAsyncMPClient
    _call_utility_async: self method args engine
""")
"""Names that are needed by an async engine with several replicas."""

ROUTER_REPLAY = read_table("""
swift.rlhf_trainers.utils
    build_routed_experts_batch: samples seq_lengths max_seq_len template device
""")

STEP_PARTS = read_table("""
swift.rlhf_trainers:GRPOTrainer
    _assemble_teacher_api_logps _fast_infer _generate_completions
        _get_per_token_logps_and_entropies _infer_single_or_multi_turn _move_model_to_vllm
        _prepare_batch_inputs _prepare_inputs _rollout_samples _score_completions _wait_queue
        evaluation_loop resample_encode_failed_inputs training_step
swift.rlhf_trainers:GKDTrainer
    _fetch_and_assemble_teacher_logprobs
accelerate:Accelerator
    sync_gradients
accelerate.utils.deepspeed:DeepSpeedEngineWrapper
    backward: self loss sync_gradients
""")

NEEDED = (*COMMAND_LINE, *TRAINER, *ENGINE, *SERVER, *DATA_PARALLEL)
OPTIONAL = {
    "positions of prompts are compared": POSITIONS,
    "replay of a rollout's experts": ROUTER_REPLAY,
    "the time of a step, part by part": STEP_PARTS,
}
"""Features that a release without these names goes without."""
