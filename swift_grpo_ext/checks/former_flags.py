"""Flags that ms-swift 4 does not have, and people still type: what takes their place.

They are fields of the arguments of ms-swift 3 (2 had no GRPO), transformers 4.49 and 4.57, and TRL
0.15 to 0.29 that ms-swift 4.6 lacks, as far as something takes their place in a script of GRPO's,
and that its name is none that `did_you_mean` would find.
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
    "gc_collect_after_offload": "nothing takes its place: leave it out",
    # transformers 4
    "save_safetensors": "safe_serialization",
    "overwrite_output_dir": "--add_version false writes into a folder that is there",
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
