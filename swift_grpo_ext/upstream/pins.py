"""All methods of ms-swift, vLLM and others that we override, or call with their signature.

Each table is verified once, before the classes that build on it are used: `COMMAND_LINE` in
`register()`, `TRAINER` before the trainer is made, `ENGINE`, `CPU` and `SERVER` when the rollout
engine is installed, which needs vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping

from swift_grpo_ext.upstream.contract import Pin


def _pins(module: str, owner: str, methods: Mapping[str, str]) -> tuple[Pin, ...]:
    """Methods of one class, or with an empty name itself, each with its parameters."""
    return tuple(
        Pin(module, f"{owner}.{name}".strip("."), tuple(parameters.split()))
        for name, parameters in methods.items()
    )


COMMAND_LINE = (
    *_pins("swift.arguments", "BaseArguments", {
        "_init_model_kwargs": "self",
        "load_dataset": "self",
    }),
    *_pins("swift.arguments", "RLHFArguments", {"_check_grpo": "self"}),
    *_pins("swift.arguments", "RolloutArguments", {"_check_device_count": "self"}),
    *_pins("swift.pipelines.base", "SwiftPipeline", {"_parse_args": "self args"}),
    Pin("swift.trainers", "TrainerFactory.TRAINER_MAPPING"),
    Pin("swift.trainers", "TrainerFactory.TRAINING_ARGS_MAPPING"),
    *_pins("swift.trainers", "TrainerFactory", {"get_cls": "args mapping"}),
    Pin("swift.callbacks", "callbacks_map"),
    *_pins("swift.callbacks", "TrainerCallback", {
        "": "args trainer",
        "on_train_begin": "self args state control",
        "on_step_end": "self args state control",
        "on_prediction_step": "self args state control",
        "on_train_end": "self args state control",
    }),
)  # fmt: skip

TRAINER = (
    Pin("swift.rlhf_trainers", "GRPOConfig"),
    *_pins("swift.rlhf_trainers", "GRPOTrainer", {
        "": "model ref_model reward_model reward_funcs _args kwargs",
        "_add_prompt_id_to_inputs": "self samples",
        "_engine_infer": "self infer_requests request_config use_tqdm",
        "_get_logps_via_local_forward":
            "self model model_inputs logits_to_keep input_ids compute_entropy",
        "_get_per_token_logps_and_entropies_single":
            "self model model_inputs grpo_batch compute_entropy",
        "_get_request_config": "self",
        "_get_train_sampler": "self train_dataset",
        "_load_best_model": "self",
        "_load_from_checkpoint": "self resume_from_checkpoint model",
        "_load_state_dict_to_vllm": "self state_dict",
        "_move_model_to_vllm": "self skip_async_check",
        "_postprocess_rollout_outputs": "self samples outputs",
        "_prefetch": "self dataloader",
        "_compute_rewards_per_func": "self samples",
        "_prepare_batch_inputs": "self samples",
        "_postprocess_batch": "self samples batch_encoded_inputs",
        "_prepare_inputs": "self inputs",
        "_prepare_metrics": "self",
        "_prepare_resample_data_iterator": "self",
        "_prepare_rollout_params": "self",
        "_prepare_vllm": "self",
        "_prepare_vllm_engine": "self",
        "_rollout": "self samples request_config is_global_inputs",
        "_save_checkpoint": "self args kwargs",
        "compute_liger_loss": "self unwrapped_model model_inputs grpo_batch",
        "evaluation_loop": "self dataloader",
        "log": "self logs start_time",
        "resample_encode_failed_inputs": "self inputs",
        "samples2requests": "self samples",
        "split_by_mini_batches": "self samples",
    }),
    *_pins("swift.rlhf_trainers.vllm_client", "VLLMClient", {"init_communicator": "self device"}),
    *_pins("swift.rlhf_trainers.vllm_client", "", {
        "_broadcast_tensors_for_vllm_weight_sync": "communicator tensors",
    }),
    *_pins("swift.rl_core.data", "OnPolicySample", {
        "from_row": "cls row",
        "to_infer_request": "self include_extra",
    }),
    *_pins("swift.infer_engine", "TransformersEngine", {
        "_get_adapter_names": "self adapter_request",
        "_infer": "self infer_requests request_config adapter_request pre_infer_hook",
        "_infer_full":
            "self inputs generation_config adapter_request request_config template_inputs",
        "infer": "self infer_requests request_config metrics use_tqdm adapter_request",
        "preprocess_logits": "batched_logits batched_generate_ids top_logprobs",
    }),
    *_pins("swift.infer_engine.infer_engine", "InferEngine", {
        "_get_logprobs": "self logprobs_list token_ids top_logprobs",
    }),
    Pin("swift.infer_engine.infer_engine", "InferEngine._get_toolcall",
        ("self", "response", "template_inputs"), also=(("self", "response"),)),
    *_pins("swift.template.base", "Template", {
        "_add_dynamic_eos": "input_ids labels loss_scale suffix_tokens_id",
        "_get_response_prefix": "self inputs",
        "_load_image": "image load_images",
        "decode_generate_ids": "self generate_ids is_finished first_token template_inputs",
        "encode": "self inputs",
        "generate": "self model",
        "get_generate_ids": "self generate_ids num_prompt_tokens",
        "prepare_generate_kwargs": "self generate_kwargs model",
        "replace_video2image": "self load_video_func inputs replace_tag",
        "skip_stop_tokens": "self generate_ids is_finished",
    }),
    *_pins("swift.template.utils", "StopWordsCriteria", {"": "tokenizer stop_words"}),
    *_pins("transformers.image_processing_utils", "BaseImageProcessor", {
        "preprocess": "self images",
    }),
    *_pins("transformers.video_processing_utils", "BaseVideoProcessor", {
        "preprocess": "self videos",
    }),
    *_pins("qwen_vl_utils", "", {"fetch_video": "ele"}),
    *_pins("PIL.Image", "Image", {
        "_ensure_mutable": "self",
        "_new": "self im",
        "convert": "self mode",
        "resize": "self size resample box reducing_gap",
    }),
    *_pins("swift.arguments", "BaseArguments", {
        "get_model_processor": "self",
        "get_template": "self processor kwargs",
    }),
    *_pins("swift.pipelines.export.merge_lora", "", {
        "merge_lora": "args device_map replace_if_exists",
    }),
)  # fmt: skip

ENGINE = (
    *_pins("swift.infer_engine.grpo_vllm_engine", "GRPOVllmEngine", {
        "": "model_id_or_path",
        "_batch_infer_stream": "self tasks stream use_tqdm metrics",
        "_create_chat_completion_response": "self result inputs request_config request_id",
        "async_infer": "self infer_requests request_config metrics use_tqdm kwargs",
        "infer": "self infer_requests request_config metrics use_tqdm adapter_request",
        "infer_async": "self infer_request request_config adapter_request pre_infer_hook",
    }),
    *_pins("swift.infer_engine.vllm_engine", "VllmEngine", {
        "_add_request": "self inputs generation_config request_id adapter_request",
    }),
    Pin("swift.infer_engine.vllm_engine", "VllmEngine.inner_model_executor"),
    *_pins("swift.infer_engine.infer_engine", "InferEngine", {
        "_batch_encode": "self infer_requests strict",
    }),
)  # fmt: skip

CPU = (
    *_pins("swift.rlhf_trainers.utils", "FlattenedTensorBucket", {
        "": "named_tensors flattened_tensor metadata",
    }),
    *_pins("swift.rlhf_trainers.utils", "", {
        "finish_vllm_weight_reload": "vllm_model model_config target_device",
    }),
    *_pins("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", {
        "reload_weights": "self weights_iterator weights_path is_checkpoint_format",
    }),
    *_pins("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", {
        "_bookkeeping_sync": "self scheduler_output sampler_output logits hidden_states "
            "num_scheduled_tokens",
        "_sample": "self logits spec_decode_metadata",
    }),
    *_pins("vllm.distributed.device_communicators.cpu_communicator", "_CPUSHMDistributed", {
        "make_group_name": "communicator",
    }),
    *_pins("vllm.distributed.utils", "StatelessProcessGroup", {"": "rank world_size store"}),
)  # fmt: skip
"""Where there is no accelerator."""

SERVER = (
    *_pins("swift.pipelines.infer.rollout", "SwiftRolloutDeploy", {
        "_register_rl_rollout_app": "self",
        "_start_data_parallel_workers": "self",
        "get_engine_type": "self",
        "get_model_state_keys": "self",
        "get_world_size": "self",
        "infer": "self infer_requests request_config use_tqdm",
        "init_communicator": "self request",
        "process_weights_after_loading": "self",
        "reset_encoder_cache": "self",
        "reset_mm_cache": "self",
        "reset_prefix_cache": "self",
    }),
    *_pins("swift.pipelines.infer.rollout", "", {
        "llm_worker": "args data_parallel_rank master_port connection",
        "llm_worker_entry": "args kwargs",
    }),
    *_pins("swift.pipelines.infer.rollout", "StatelessProcessGroup", {
        "create": "host port rank world_size data_expiration_seconds store_timeout",
    }),
    Pin("swift.pipelines.infer.rollout", "SwiftRolloutDeploy._require_api_key", ("self",),
        since="4.6"),
    Pin("swift.pipelines.infer.rollout", "InitCommunicatorRequest"),
    *_pins("swift.pipelines.infer.rollout", "WeightSyncWorkerExtension", {
        "close_communicator": "self",
        "init_communicator": "self host port world_size",
        "process_weights_after_loading": "self",
        "update_flattened_params": "self metadatas",
        "update_named_param": "self name dtype shape",
    }),
    Pin("swift.utils", "SafeMediaPath.check", ("cls", "path"), since="4.6"),
)  # fmt: skip
"""Of `swift rollout`."""

PROCESSOR_COPIES = (
    Pin("vllm.tokenizers.hf", "ThreadSafeHFTokenizerMixin"),
    Pin("vllm.transformers_utils.processor", "cached_get_processor"),
    *_pins("vllm.transformers_utils.processor", "", {
        "get_processor": "processor_name args revision trust_remote_code processor_cls kwargs",
    }),
)  # fmt: skip
"""Without them a run starts later, and works."""

ALL = (*COMMAND_LINE, *TRAINER, *ENGINE, *CPU, *SERVER, *PROCESSOR_COPIES)
