"""Flags that ms-swift 4 does not have, and people still type: what takes their place.

They are the fields of the arguments of ms-swift 2.6 and 3.0 to 3.12, transformers 4.49 and 4.57,
and TRL 0.15 to 0.29 that ms-swift 4.6 lacks, as far as something takes their place in GRPO, and
that its name is none that `did_you_mean` would find.
"""

from __future__ import annotations

from collections.abc import Collection

from swift_grpo_ext.checks.finding import did_you_mean

ENGINES = "engines are told by --vllm_mode: colocate, or server beside `swift rollout`"

FORMER = {
    # ms-swift 3
    "train_type": "tuner_type",
    "ckpt_dir": "adapters are named by --adapters, whole weights by --model",
    "lora_modules": "adapters",
    "enable_cache": "load_from_cache_file",
    "train_sampler_random": "train_dataloader_shuffle",
    "train_dataset_sample": "--dataset NAME#NUMBER takes so many rows",
    "tools_prompt": "agent_template",
    "channels": "enable_channel_loss",
    "mini_batch_size": "give a smaller --per_device_train_batch_size, and more "
    "--gradient_accumulation_steps",
    "num_infer_workers": ENGINES,
    "vllm_device": ENGINES,
    "use_lmdeploy": "rollouts are vLLM's (--use_vllm)",
    "lmdeploy_device": "rollouts are vLLM's (--use_vllm)",
    "gc_collect_after_offload": "nothing takes its place: leave it out",
    # ms-swift 2
    "sft_type": "tuner_type",
    "model_id_or_path": "model",
    "ref_model_id_or_path": "ref_model",
    "reward_model_id_or_path": "reward_model",
    "dtype": "torch_dtype",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "lora_target_modules": "target_modules",
    "quantization_bit": "quant_bits",
    "bnb_4bit_comp_dtype": "bnb_4bit_compute_dtype",
    "custom_train_dataset_path": "dataset",
    "custom_val_dataset_path": "val_dataset",
    "preprocess_num_proc": "dataset_num_proc",
    "rescale_image": "max_pixels",
    "use_flash_attn": "attn_impl",
    "vit_use_gc": "vit_gradient_checkpointing",
    # transformers 4
    "no_cuda": "use_cpu",
    "save_safetensors": "safe_serialization",
    "overwrite_output_dir": "--add_version false writes into a folder that is there",
    "adafactor": "give --optim adafactor",
    "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config",
    "fsdp_min_num_params": "fsdp_config",
    "dispatch_batches": "accelerator_config",
    "split_batches": "accelerator_config",
    # TRL
    "max_prompt_length": "max_length",
    "mask_truncated_completions": "overlong_filter",
    "num_completions_to_print": "log_completions",
    "shuffle_dataset": "dataset_shuffle",
    "disable_dropout": "leave it out: dropout is off",
    "vllm_guided_decoding_regex": "structured_outputs_regex",
    "vllm_importance_sampling_cap": "rollout_importance_sampling_threshold",
    "vllm_enable_sleep_mode": "sleep_level",
    "off_policy_mask_threshold": "off_policy_sequence_mask_delta",
    "sapo_temperature_pos": "tau_pos",
    "sapo_temperature_neg": "tau_neg",
}
"""A former flag has the flag of ms-swift 4 that takes its place here, or a remedy."""


def flag_hint(name: str, known: Collection[str]) -> str:
    """Return what to write in the place of a flag that does not exist; "" where nothing is near.

    Args:
        name: with its dashes or without, as `known` has them.
        known: the flags of `swift rlhf` or of `swift rollout`.
    """
    dashes = name[: len(name) - len(name.lstrip("-"))]
    bare = name.lstrip("-").partition("=")[0].replace("-", "_")
    # Since ms-swift 3.8 those of vLLM begin so.
    new = FORMER.get(bare, f"vllm_{bare}")
    if dashes + new in known:
        return f"ms-swift 4 calls it {dashes}{new}"
    if " " in new:
        return f"ms-swift 4 has none of that name: {new}"
    return did_you_mean(name, known)
