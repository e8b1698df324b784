"""All methods of ms-swift, vLLM and others that we override, or call with their signature.

Each table is verified once, before the classes that build on it are used: `COMMAND_LINE` in
`register()`, `TRAINER` before the trainer is made, `ENGINE` and `SERVER` when the rollout
engine is installed, which needs vLLM, `DATA_PARALLEL` when such an engine is made.

A table has a line for each module, or class of it (`module:Class`). Indented below stand its names,
those that share their parameters on one line: `names: parameters`. `()` is the class itself; a name
without parameters needs only be there; `|` parts the signatures of several releases; `binds` names
local variables that we read (`local_names.py`).
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
        line, _, binds = line.partition(" binds ")
        line, _, since = line.partition(" since ")
        names, _, signatures = line.partition(":")
        known = [tuple(signature.split()) for signature in signatures.split("|")]
        for name in names.split():
            path = ".".join(part for part in (owner, name) if part not in ("", "()"))
            also, bound = tuple(known[1:]), tuple(binds.split())
            pins.append(Pin(module, path, known[0] or None, also, since or None, bound))
    return tuple(pins)


COMMAND_LINE = read_table("""
swift.arguments:BaseArguments
    _init_model_kwargs _init_model_info load_dataset: self
swift.arguments:RLHFArguments
    _check_grpo _init_external_vllm: self
swift.arguments:RolloutArguments
    _check_device_count: self
swift.pipelines.base:SwiftPipeline
    _parse_args: self args
swift.dataset:DatasetLoader
    load: self dataset_syntax dataset_meta use_hf
swift.dataset:RowPreprocessor
    batched_preprocess: self batched_row strict ignore_max_length_error
swift.utils.utils
    _patch_get_type_hints
transformers:HfArgumentParser
    parse_args_into_dataclasses: self args return_remaining_strings look_for_args_file
        args_filename args_file_flag binds remaining_args
swift.trainers:TrainerFactory
    TRAINER_MAPPING TRAINING_ARGS_MAPPING
swift.callbacks
    callbacks_map
swift.callbacks:TrainerCallback
    (): args trainer
    on_train_begin on_optimizer_step on_step_end on_prediction_step on_train_end:
        self args state control
""")

TRAINER = read_table("""
swift.rlhf_trainers
    GKDConfig GRPOConfig
swift.rlhf_trainers.rollout_mixin:RolloutTrainerMixin
    _load_state_dict_to_vllm: self state_dict
    resample_encode_failed_inputs: self inputs max_resample_rounds strip_response
    _infer_teacher_requests: self handle topk teacher_client
    _scatter_teacher_parsed: self handle parsed_global
swift.rlhf_trainers:GKDTrainer
    _build_teacher_requests _encode_samples _generate_completions _prepare_batch_inputs: self
        samples
    compute_loss: self model inputs return_outputs num_items_in_batch
    load_teacher_model_context: self
swift.rlhf_trainers.gkd_loss:DataSource
    STUDENT
swift.rlhf_trainers.gkd_loss
    _align_vocab: student_logits teacher_logits
    jsd_loss: s_logits t_logits beta
swift.rlhf_trainers:GRPOTrainer
    (): model ref_model reward_model reward_funcs _args kwargs
    _add_prompt_id_to_inputs _compute_rewards_per_func _prepare_batch_inputs _preprocess_inputs
        samples2requests split_by_mini_batches: self samples
    _engine_infer: self infer_requests request_config use_tqdm
    _generate_completions: self samples
    _gather_teacher_requests: self requests since 4.6
    _get_logps_via_local_forward: self model model_inputs logits_to_keep input_ids
        compute_entropy
    _get_logps_via_sp: self model model_inputs grpo_batch logits_to_keep input_ids
        compute_entropy
    _get_per_token_logps_and_entropies_single: self model model_inputs grpo_batch
        compute_entropy
    _get_per_token_logps_and_entropies: self model model_inputs grpo_batch
    _template_context: self template
    _get_request_config _load_best_model _move_adapter_to_vllm
        _prepare_resample_data_iterator _prepare_rollout_params _prepare_scheduler
        _prepare_vllm _prepare_vllm_engine _reset_vllm_cache: self
    _get_train_sampler: self train_dataset
    _load_from_checkpoint: self resume_from_checkpoint model
    _load_state_dict_to_vllm: self state_dict
    _move_model_to_vllm: self skip_async_check
    _postprocess_rollout_outputs: self samples outputs
    _prefetch evaluation_loop: self dataloader
    _postprocess_batch: self samples batch_encoded_inputs
    _prepare_inputs resample_encode_failed_inputs: self inputs
    _rollout: self samples request_config is_global_inputs
    log: self logs start_time
    train
swift.rlhf_trainers.vllm_client:VLLMClient
    init_communicator: self device
    update_adapter_flattened_param: self peft_config metadatas flattened_tensor
    update_adapter_param: self peft_config lora_params
swift.rlhf_trainers.vllm_client
    _broadcast_tensors_for_vllm_weight_sync: communicator tensors since 4.5.3
    broadcast_tensor_for_vllm_weight_sync: communicator tensor src
    synchronize
torch.nn:Module
    forward
swift.rl_core.data:OnPolicySample
    from_row: cls row
    to_infer_request: self include_extra
    build_teacher_view to_reward_row to_teacher_template_dict: self
    apply_rollout_output: self rollout_output
swift.rl_core.data:GRPOSample
    from_row: cls row
swift.rl_core.data:GKDSample
    from_row: cls row
swift.rlhf_trainers.base_rollout_mixin:BaseRolloutTrainerMixin
    sample_cls
    to_samples: self rows
swift.dataset:RowPreprocessor
    rows_to_batched: rows
swift.rlhf_trainers.utils:FlattenedTensorBucket
    (): named_tensors flattened_tensor metadata
swift.rlhf_trainers.utils
    encode_sample: sample template
    build_rollout_logps: rollout_logprobs_list completion_mask device
    collate_to_grpo_micro_batch: samples template
    revert_runtime_names_to_checkpoint: model state_dict
swift.trainers
    disable_gradient_checkpointing: model
swift.infer_engine:TransformersEngine
    _get_adapter_names: self adapter_request
    _infer: self infer_requests request_config adapter_request pre_infer_hook
    _infer_full: self inputs generation_config adapter_request request_config
        template_inputs
    infer: self infer_requests request_config metrics use_tqdm adapter_request
    preprocess_logits: batched_logits batched_generate_ids top_logprobs
swift.infer_engine.infer_engine:InferEngine
    _get_logprobs: self logprobs_list token_ids top_logprobs
    _get_toolcall: self response template_inputs | self response
swift.rollout.multi_turn:MultiTurnScheduler
    check_finished on_turn_end step: self infer_request response_choice current_turn
    get_response_token_data: self infer_request response_choice since 4.5
    on_trajectory_start: self requests
    restore_assistant_message_snapshots: snapshots since 4.5
    snapshot_and_materialize_assistant_messages: self infer_request since 4.5
swift.template.base:Template
    _add_dynamic_eos: input_ids labels loss_scale suffix_tokens_id
    _get_response_prefix encode: self inputs
    _load_image: image load_images
    _get_height_width: inputs
    decode_generate_ids: self generate_ids is_finished first_token template_inputs
    generate: self model
    get_generate_ids: self generate_ids num_prompt_tokens
    prepare_generate_kwargs: self generate_kwargs model
    replace_video2image: self load_video_func inputs replace_tag
swift.template.template_inputs:StdTemplateInputs
    __post_init__: self
    remove_messages_media: messages
swift.template.base:Template
    _replace_image_tags: inputs
swift.template.vision_utils
    _check_path load_file: path
    load_image: image
swift.template.base
    load_image: image
swift.template.utils:StopWordsCriteria
    (): tokenizer stop_words
transformers.image_processing_utils:BaseImageProcessor
    preprocess: self images
transformers.video_processing_utils:BaseVideoProcessor
    preprocess: self videos
qwen_vl_utils
    fetch_video: ele
PIL.Image:Image
    _ensure_mutable: self
    _new: self im
    convert: self mode
    resize: self size resample box reducing_gap
swift.arguments:BaseArguments
    get_model_processor: self
    get_template: self processor kwargs
swift.pipelines.export.merge_lora
    merge_lora: args device_map replace_if_exists
""")

ENGINE = read_table("""
swift.template.vision_utils
    load_video_hf: videos
    load_vllm_video: path num_frames
swift.infer_engine.grpo_vllm_engine:GRPOVllmEngine
    (): model_id_or_path
    _batch_infer_stream: self tasks stream use_tqdm metrics
    _create_chat_completion_response: self result inputs request_config request_id
    async_infer: self infer_requests request_config metrics use_tqdm kwargs
    infer: self infer_requests request_config metrics use_tqdm adapter_request
    infer_async: self infer_request request_config adapter_request pre_infer_hook
swift.infer_engine.vllm_engine:VllmEngine
    _add_request: self inputs generation_config request_id adapter_request
    _format_prompt_logprobs: prompt_logprobs
    inner_model_executor
swift.infer_engine.infer_engine:InferEngine
    _batch_encode: self infer_requests strict
    set_default_max_tokens: self request_config inputs
swift.template.base:Template
    _truncate: self input_ids labels encoded truncation_strategy
vllm.lora.worker_manager:LRUCacheWorkerLoRAManager
    add_adapter: self lora_request
""")

NAMED_MEDIA = read_table("""
vllm.v1.engine.processor:Processor
    _maybe_build_mm_uuids: self request_id prompt
    process_inputs: self request_id prompt params
""")
"""A repair of vLLM 0.11; newer releases need none."""

PROCESSOR_COPIES = read_table("""
vllm.transformers_utils.processor
    get_processor: processor_name args revision trust_remote_code processor_cls kwargs
    cached_get_processor
""")

POSITIONS = read_table("""
vllm.v1.engine.input_processor:InputProcessor
    process_inputs: self request_id prompt params
vllm.model_executor.model_loader.utils
    get_model_cls: model_config
vllm.model_executor.models.interfaces:SupportsMRoPE
    get_mrope_input_positions: self input_tokens mm_features
""")

GEMMA4_FORWARD = read_table("""
swift.model.models.gemma
    _patch_gemma4_forward: model processor
""")
GEMMA4_FEATURES = read_table("""
transformers.models.gemma4.modeling_gemma4:Gemma4Model
    get_image_features get_video_features: self
transformers.models.gemma4_unified.modeling_gemma4_unified:Gemma4UnifiedModel
    get_image_features get_video_features: self
""")
GLM_OCR_POSITIONS = read_table("""
swift.template.templates.glm:GLM4vPackingTemplateMixin
    _get_position_ids: self inputs
swift.template.templates.glm:GLMOCRTemplate
    _data_collator: self batch padding_to
    use_model
""")
QWEN_POSITIONS = read_table("""
transformers.models.qwen2_vl.modeling_qwen2_vl:Qwen2VLModel
    get_rope_index: self input_ids mm_token_type_ids image_grid_thw video_grid_thw
transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLModel
    get_rope_index: self input_ids mm_token_type_ids image_grid_thw video_grid_thw
        second_per_grid_ts
""")
INTERNVL_VIDEOS = read_table("""
swift.template.templates.internvl:InternvlhfTemplate
    _encode: self inputs
    _extend_tokens: input_ids labels loss_scale replace_idx_list get_new_tokens
swift.template.templates.internvl
    InternvlTemplate
""")
"""Repairs of models and templates of ms-swift and transformers; others need none."""

SERVER = read_table("""
swift.pipelines.infer.rollout:SwiftRolloutDeploy
    _register_rl_rollout_app _start_data_parallel_workers close_communicator get_engine_type
        get_model_state_keys get_world_size process_weights_after_loading
        reset_encoder_cache reset_mm_cache reset_prefix_cache: self
    infer: self infer_requests request_config use_tqdm
    init_communicator: self request
    _require_api_key: self since 4.6
swift.pipelines.infer.rollout
    llm_worker: args data_parallel_rank master_port connection
    llm_worker_entry: args kwargs
    get_rollout_engine_type: args engine
    InitCommunicatorRequest
vllm.v1.engine.exceptions
    EngineDeadError
vllm.distributed.utils:StatelessProcessGroup
    barrier: self timeout
swift.rollout.multi_turn:MultiTurnScheduler
    async_infer: self infer_requests request_config binds _infer_async_single.infer_request
swift.pipelines.infer.rollout:StatelessProcessGroup
    create: host port rank world_size data_expiration_seconds store_timeout
swift.pipelines.infer.rollout:WeightSyncWorkerExtension
    close_communicator process_weights_after_loading: self
    init_communicator: self host port world_size
    update_adapter_flattened_param: self peft_config metadatas
    update_adapter_param: self peft_config lora_tensors_metadata
    update_flattened_params: self metadatas
    update_named_param: self name dtype shape
swift.utils:SafeMediaPath
    check: cls path since 4.6
swift.utils:SafeUrlFetcher
    check_url: cls url since 4.6
    read: cls url kwargs since 4.6
swift.template.vision_utils
    load_file: path
""")
"""Names that `swift rollout` is extended at."""

DATA_PARALLEL = read_table("""
vllm.v1.engine.async_llm:AsyncLLM
    collective_rpc: self method timeout args kwargs
    generate: self prompt sampling_params request_id prompt_text lora_request
        tokenization_kwargs trace_headers priority data_parallel_rank
        | self prompt sampling_params request_id lora_request trace_headers priority
        data_parallel_rank
vllm.v1.engine.core_client:DPLBAsyncMPClient
    _call_utility_async: self method args engine
""")
"""Names that are needed by an async engine with several replicas."""

ROUTER_REPLAY = read_table("""
swift.rlhf_trainers.utils
    build_routed_experts_batch: samples seq_lengths max_seq_len template device
""")

SEGMENTS = read_table("""
transformers.modeling_utils:AttentionInterface
    __setitem__: self key value
""")

STEP_PARTS = read_table("""
swift.rlhf_trainers:GRPOTrainer
    _assemble_teacher_api_logps _fast_infer _generate_completions
        _get_per_token_logps_and_entropies _infer_single_or_multi_turn _move_model_to_vllm
        _prepare_batch_inputs _prepare_inputs _rollout_samples _score_completions _wait_queue
        evaluation_loop log resample_encode_failed_inputs training_step
swift.rlhf_trainers:GKDTrainer
    _fetch_and_assemble_teacher_logprobs
accelerate:Accelerator
    sync_gradients
accelerate.utils.deepspeed:DeepSpeedEngineWrapper
    backward: self loss sync_gradients
""")

FULL_DETERMINISM = read_table("""
transformers.trainer
    enable_full_determinism: seed warn_only
accelerate.utils:DistributedDataParallelKwargs
    register_comm_hook: self model
torch.utils.deterministic
    fill_uninitialized_memory
""")

REPLACED = read_table("""
swift.pipelines.train.rlhf:SwiftRLHF
    args_class
swift.pipelines.infer.rollout:SwiftRolloutDeploy
    args_class
swift.pipelines.infer.rollout
    GRPOVllmEngine Pipe broadcast_tensor_for_vllm_weight_sync synchronize
swift.infer_engine
    GRPOVllmEngine
""")
"""Attributes that are replaced by a subclass of what stands there, or by its like."""

NEEDED = (*COMMAND_LINE, *TRAINER, *ENGINE, *SERVER, *DATA_PARALLEL)
OPTIONAL = {
    "a tokenizer is copied when needed": PROCESSOR_COPIES,
    "positions of prompts are compared": POSITIONS,
    "replay of a rollout's experts": ROUTER_REPLAY,
    "a prompt that samples share is read once": SEGMENTS,
    "the time of a step, part by part": STEP_PARTS,
    "deterministic training passes beside an engine": FULL_DETERMINISM,
}
"""Features that a release without these names goes without, or repairs that it does not need."""

ALL = (*NEEDED, *(pin for table in OPTIONAL.values() for pin in table))
MODELS = (
    *GEMMA4_FORWARD,
    *GEMMA4_FEATURES,
    *GLM_OCR_POSITIONS,
    *INTERNVL_VIDEOS,
    *QWEN_POSITIONS,
)
UNVERIFIED = (*NAMED_MEDIA, *MODELS, *REPLACED)
