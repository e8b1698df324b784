"""APIs of ms-swift and vLLM that we call, or change within a block: `module:name`, followed by the
first parameters if these matter, without a classmethod's `cls`.

Each table is verified once: `COMMAND_LINE` in `register()`, `TRAINER` before the trainer is made,
`ENGINE` when the rollout engine is imported, `SERVER` when `swift rollout` gets our routes.
"""

from __future__ import annotations

COMMAND_LINE = """
swift.dataset:DatasetLoader.load self dataset_syntax
swift.dataset:RowPreprocessor.batched_preprocess self batched_row strict ignore_max_length_error
swift.dataset:RowPreprocessor.rows_to_batched rows
swift.callbacks:TrainerCallback args trainer
""".strip().splitlines()

TRAINER = """
swift.rlhf_trainers:GRPOTrainer._add_prompt_id_to_inputs
swift.rlhf_trainers:GRPOTrainer._get_request_config
swift.rlhf_trainers:GRPOTrainer._template_context self template
swift.rlhf_trainers:GRPOTrainer.resample_encode_failed_inputs
swift.rlhf_trainers:GKDTrainer.load_teacher_model_context
swift.rlhf_trainers.base_rollout_mixin:BaseRolloutTrainerMixin.sample_cls
swift.rlhf_trainers.gkd_loss:_align_vocab student_logits teacher_logits
swift.rlhf_trainers.gkd_loss:jsd_loss s_logits t_logits beta
swift.rlhf_trainers.vllm_client:VLLMClient.init_communicator self device
swift.rlhf_trainers.vllm_client:VLLMClient.update_adapter_flattened_param self peft_config \
    metadatas flattened_tensor
swift.rlhf_trainers.vllm_client:VLLMClient.update_adapter_param self peft_config lora_params
swift.rlhf_trainers.utils:FlattenedTensorBucket named_tensors flattened_tensor metadata
swift.rlhf_trainers.utils:encode_sample sample template
swift.rlhf_trainers.utils:build_rollout_logps rollout_logprobs_list completion_mask device
swift.rlhf_trainers.utils:collate_to_grpo_micro_batch samples template
swift.rlhf_trainers.utils:revert_runtime_names_to_checkpoint model state_dict
swift.rl_core.data:OnPolicySample.from_row row
swift.rl_core.data:OnPolicySample.to_infer_request
swift.rl_core.data:OnPolicySample.build_teacher_view
swift.rl_core.data:OnPolicySample.to_reward_row
swift.rl_core.data:OnPolicySample.to_teacher_template_dict
swift.infer_engine.infer_engine:InferEngine._get_toolcall self response template_inputs
swift.template.base:Template._add_dynamic_eos
swift.template.base:Template._get_response_prefix self inputs
swift.template.base:Template._replace_image_tags inputs
swift.template.base:Template.decode_generate_ids self generate_ids is_finished first_token \
    template_inputs
swift.template.template_inputs:StdTemplateInputs.remove_messages_media messages
swift.template.vision_utils:load_file path
swift.template.vision_utils:load_video_hf videos
""".strip().splitlines()

ENGINE = """
swift.infer_engine.vllm_engine:VllmEngine.inner_model_executor
vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter self lora_request
vllm.renderers.base:BaseRenderer.clear_mm_cache self
vllm.renderers.base:BaseRenderer.clear_mm_cache_async self
vllm.v1.engine.async_llm:AsyncLLM.generate self prompt sampling_params request_id
vllm.v1.engine.core_client:DPLBAsyncMPClient._call_utility_async self method args engine
""".strip().splitlines()

SERVER = """
swift.pipelines.infer.deploy:SwiftDeploy._materialize_media value media_type temp_dir
swift.pipelines.infer.rollout:llm_worker args data_parallel_rank master_port connection
swift.pipelines.infer.rollout:llm_worker_entry
swift.pipelines.infer.rollout:StatelessProcessGroup.create host port rank world_size \
    data_expiration_seconds store_timeout
swift.template.vision_utils:load_file path
swift.utils:SafeMediaPath.check path
swift.utils:SafeUrlFetcher.check_url url
vllm.distributed.utils:StatelessProcessGroup.barrier self timeout
vllm.utils.system_utils:set_ulimit target_soft_limit
vllm.v1.engine.exceptions:EngineDeadError
""".strip().splitlines()

NEEDED = (*COMMAND_LINE, *TRAINER, *ENGINE, *SERVER)
