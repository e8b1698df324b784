"""Rules that the settings of a run must keep to hold together. Pure: nothing else is looked at.

Where ms-swift has a check of its own, the rule is the same, met before a model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from swift_grpo_ext.checks.finding import Finding, Findings, divisors, error, note, warning, words
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE
from swift_grpo_ext.tools.check.settings import Run, devices_of, environment

ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""The DeepSpeed configurations that ms-swift ships; anything else is a file's name or JSON."""

PLUGIN = "grpo_ext.py"

SAME_ON_BOTH_SIDES = [
    "model",
    "model_type",
    "template",
    "torch_dtype",
    "system",
    "new_special_tokens",
    "agent_template",
    "response_prefix",
    "vllm_enable_lora",
]
FROM_SERVERS = ("multi_turn_scheduler", "max_turns", "use_gym_env")
"""What a training learns from its servers where it does not say so itself (rollout_mixin.py)."""

SAME_IN_ENV = ("MAX_PIXELS", "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_PIXELS", "FPS")
"""What images become on either side: other values, other prompt ids."""

ENGINE_SETTINGS = [
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_data_parallel_size",
    "vllm_max_model_len",
    "vllm_enforce_eager",
    "vllm_engine_kwargs",
    "vllm_limit_mm_per_prompt",
    "vllm_max_num_seqs",
]


def check(run: Run) -> list[Finding]:
    """All that is to be said about a run's settings alone, errors first."""
    found = list(run.unread)
    if not any(finding.level == "error" for finding in found):  # else there is nothing to count
        rules = RULES if run.training is None else TRAINING_RULES + RULES
        found += [finding for rule in rules for finding in rule(run)]
    return errors_first(found)


def errors_first(findings: list[Finding]) -> list[Finding]:
    order = ("error", "warning", "note", "ok")
    return sorted(findings, key=lambda finding: order.index(finding.level))


# --- what is trained, and for what ---


def check_algorithm(run: Run) -> Findings:
    if run.train("rlhf_type") != "grpo":
        yield error("rlhf_type", f"is {run.train('rlhf_type')}; expected grpo.")
    truncation = run.train("truncation_strategy")
    if truncation not in (None, "left", "delete"):
        yield error("truncation_strategy", f"is {truncation}; GRPO takes left or delete.")
    elif truncation != "delete" and run.train("max_length"):
        yield warning(
            "truncation_strategy",
            "left cuts prompts for the training that the rollout saw whole, and images with them: "
            "set delete, which replaces prompts that are too long.",
        )
    if run.train("async_generate") and run.train("multi_turn_scheduler"):
        yield error("async_generate", "does not work with multi_turn_scheduler: leave one out.")
    deepspeed = run.train("deepspeed")
    is_name = isinstance(deepspeed, str) and not deepspeed.endswith((".json", "}"))
    if is_name and deepspeed not in ZERO:
        yield error("deepspeed", f"is {deepspeed}; expected a JSON file or one of {words(ZERO)}.")
    if "" in run.train("stop_words"):
        yield error("stop_words", "holds an empty string, which would end every completion.")


def check_plugins(run: Run) -> Findings:
    for side, settings in run.sides:
        names = [PurePath(plugin).name for plugin in settings.get("external_plugins") or ()]
        if PLUGIN not in names:
            yield error(
                "external_plugins",
                f"{run.name(side)} does not load {PLUGIN}: `swift-grpo-ext plugin-path` tells "
                "where the installed one is.",
            )


def check_rewards(run: Run) -> Findings:
    """Something rewards: a function, a model, a gym, or a teacher (grpo_trainer.py)."""
    rewards = [*(run.train("reward_funcs") or ()), *(run.train("reward_model") or ())]
    has_gym = run.train("use_gym_env")
    if has_gym is None:  # else its servers say it
        has_gym = run.train("gym_env") or (run.has_servers and serves_gym(run))
    if has_gym:
        rewards.append("the gym's own")
    has_teacher = run.train("teacher_model") or run.train("teacher_model_server")
    is_unknown = run.has_servers and run.rollout is None and run.train("use_gym_env") is None
    if not rewards and not has_teacher and not is_unknown:
        yield error("reward_funcs", "is missing: name at least one reward function.")
    weights = run.train("reward_weights")
    numbers = (len(rewards), len(rewards) + is_unknown)  # a server's gym counts as one more
    if weights is not None and len(weights) not in numbers:
        yield error(
            "reward_weights",
            f"has {len(weights)} values for {len(rewards)} rewards ({words(rewards)}): give one "
            "for each.",
        )


# --- batches and groups ---


def check_groups(run: Run) -> Findings:
    size, batch, ranks = run.train("num_generations"), run.generation_batch, run.num_ranks
    of_rank, eval_of_rank = (run.train(f"per_device_{s}_batch_size") for s in ("train", "eval"))
    source = "generation_batch_size"
    if run.train(source) is None:
        source = f"{ranks} ranks x per_device_train_batch_size {of_rank} x "
        source += f"{run.steps_per_generation} steps_per_generation"
    if not 2 <= size <= MAX_GROUP_SIZE:
        yield error("num_generations", f"is {size}; expected 2 to {MAX_GROUP_SIZE}.")
    elif batch % size:
        yield error(
            "num_generations",
            f"{size} does not divide the {batch} samples of a generation batch ({source}): "
            f"take one of {words(divisors(batch))}, or another batch.",
        )
    else:
        text = f"a round is {batch} samples ({source}): {batch // size} prompts of {size}."
        yield note("num_generations", text)
    if ((run.training or {}).get("eval_strategy") or run.train("save_strategy")) == "no":
        return
    eval_size, eval_batch = run.train("num_generations_eval") or size, eval_of_rank * ranks
    if eval_size > 0 and eval_batch % eval_size:
        yield error(
            "per_device_eval_batch_size",
            f"{ranks} ranks x {eval_of_rank} = {eval_batch} samples cannot be shared by groups of "
            f"{eval_size} (num_generations_eval, or num_generations): change one of them, or set "
            'eval_strategy: "no".',
        )


def check_steps(run: Run) -> Findings:
    """How rounds and optimizer steps lie to one another."""
    size, steps = run.train("generation_batch_size"), run.train("steps_per_generation")
    if size is not None and size % run.global_batch:
        yield error(
            "generation_batch_size",
            f"{size} is no multiple of {run.global_batch} ({run.num_ranks} ranks x "
            f"per_device_train_batch_size {run.train('per_device_train_batch_size')}).",
        )
    if size is not None and steps is not None and size != run.global_batch * steps:
        yield error(
            "generation_batch_size",
            f"{size} is not {run.global_batch} x steps_per_generation {steps}: set one of the two.",
        )
    accumulation, serves = run.train("gradient_accumulation_steps"), run.steps_per_generation
    if serves < 1 or accumulation < 1:
        yield error("steps_per_generation", "and gradient_accumulation_steps: expected 1 or more.")
    elif serves % accumulation and accumulation % serves:
        yield note(
            "steps_per_generation",
            f"{serves} and gradient_accumulation_steps {accumulation}: some rounds end in the "
            "middle of an optimizer step, whose samples are then of two rounds.",
        )
    elif serves > accumulation:
        yield note(
            "steps_per_generation",
            f"a round serves {serves // accumulation} optimizer steps: all but the first train on "
            "samples of older weights.",
        )


# --- engines and GPUs ---


def check_engine_choice(run: Run) -> Findings:
    mode = run.train("vllm_mode")
    if run.train("use_vllm") and mode not in ("server", "colocate"):
        yield error("vllm_mode", f"is {mode}; with use_vllm: true it is server or colocate.")
    if not run.train("use_vllm") and mode is not None:
        yield error("vllm_mode", f"is {mode}, but use_vllm is not true.")
    if run.has_servers:
        ignored = "is ignored by swift rlhf with servers: set it for swift rollout."
        for name in ENGINE_SETTINGS:
            if name in (run.training or {}):
                yield warning(name, ignored)
        if run.train("sleep_level"):
            yield warning("sleep_level", "is ignored with servers: they keep their GPUs.")


def check_parallel(run: Run) -> Findings:
    """A colocated engine is spread over whole training ranks."""
    for side, _ in run.sides:
        if side == "training" and run.has_servers:
            continue
        arguments = run.arguments(side)
        parallel = arguments.vllm_tensor_parallel_size
        if parallel < 1:
            yield error("vllm_tensor_parallel_size", f"is {parallel}; expected 1 or more.")
        elif side == "training" and arguments.use_vllm and run.num_ranks % parallel:
            yield error(
                "vllm_tensor_parallel_size",
                f"{parallel} does not divide the {run.num_ranks} training ranks: an engine is "
                "spread over as many of them (NPROC_PER_NODE x NNODES in ENV).",
            )


def check_devices(run: Run) -> Findings:
    """As many GPUs are named as processes use, and none by both sides."""
    training, serving = devices_of(run.training), devices_of(run.rollout)
    ranks_of_node = environment(run.training).get("NPROC_PER_NODE")
    if training and ranks_of_node and len(training) != int(ranks_of_node):
        yield error(
            "NPROC_PER_NODE",
            f"{ranks_of_node} ranks on {len(training)} GPUs (CUDA_VISIBLE_DEVICES of "
            f"{run.name('training')}): expected one GPU for each rank.",
        )
    if serving and len(serving) != run.num_rollout_gpus:
        yield error(
            "vllm_data_parallel_size",
            f"{run.serve('vllm_data_parallel_size')} replicas with "
            f"{run.serve('vllm_tensor_parallel_size')} GPU(s) each on {len(serving)} GPUs "
            f"(CUDA_VISIBLE_DEVICES of {run.name('rollout')}): expected {run.num_rollout_gpus}.",
        )
    shared = sorted(set(training) & set(serving))
    if shared and not environment(run.training).get("NNODES"):
        text = f"GPU {words(shared)} is named by both sides: share the GPUs out."
        yield error("CUDA_VISIBLE_DEVICES", text)


def check_lengths(run: Run) -> Findings:
    """vLLM has room for the longest prompt and its completion."""
    room = ((run.rollout if run.has_servers else run.training) or {}).get("vllm_max_model_len")
    prompt, turns = run.train("max_length"), run.train("max_turns") or 1
    if not run.train("use_vllm") or room is None:
        return
    completion = run.train("max_completion_length")
    several = f"{turns} turns of " if turns > 1 else ""
    needed = (prompt or 0) + turns * completion
    if room < needed:
        yield error(
            "vllm_max_model_len",
            f"{room} is less than max_length {prompt or 'not set'} + {several}"
            f"max_completion_length {completion} = {needed}: completions of long prompts "
            "would be cut short.",
        )
    if prompt is None:
        yield warning(
            "max_length",
            f"is not set: prompts of more than {room - turns * completion} tokens leave no "
            "room for a whole completion.",
        )


# --- servers, and what both sides have to agree on ---


def check_servers(run: Run) -> Findings:
    """Addresses of the servers."""
    if not run.has_servers:
        return
    urls, hosts = run.train("vllm_server_base_url") or (), run.train("vllm_server_host") or ()
    ports = run.train("vllm_server_port")
    if not urls and not hosts:
        yield error("vllm_server_host", "is missing: with vllm_mode: server, say where they are.")
    elif not urls and len(hosts) != len(ports):
        yield error(
            "vllm_server_port",
            f"{len(ports)} ports for {len(hosts)} servers (vllm_server_host): give one for each.",
        )
    addresses = urls or [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    for address, times in Counter(addresses).items():
        if times > 1:
            text = f"{address} is given for {times} servers: each has its own."
            yield error("vllm_server_port", text)
    group_ports = run.train("vllm_server_group_port") or ()
    if len(group_ports) > 1:
        if len(group_ports) != max(len(hosts), len(urls)):
            yield error("vllm_server_group_port", "give one for each server, or only the first.")
        elif len(set(zip(hosts or urls, group_ports, strict=True))) < len(group_ports):
            yield error("vllm_server_group_port", "holds one port twice for one host.")
    if run.rollout is not None and hosts and run.serve("port") not in ports:
        yield error(
            "port",
            f"{run.serve('port')} of {run.name('rollout')} is not among vllm_server_port "
            f"({words(ports)}) of {run.name('training')}.",
        )


def check_agreement(run: Run) -> Findings:
    """Both sides mean the same model, prompts and pixels."""
    if run.training is None or run.rollout is None:
        return

    def differ(name: str, ours: Any, theirs: Any, why: str, where: str = "") -> Finding:
        shown = ["not set" if value is None else repr(value) for value in (ours, theirs)]
        text = f"is {shown[0]} in {run.name('training')} and {shown[1]} in {run.name('rollout')}"
        return error(name, f"{where}{text}: {why}")

    rollout = {**run.rollout, "use_gym_env": serves_gym(run)}
    for name in (*SAME_ON_BOTH_SIDES, *FROM_SERVERS):
        ours, theirs = run.training.get(name), rollout.get(name)
        # A system prompt travels with each request.
        is_told = ours is None if name in FROM_SERVERS else name == "system" and theirs is None
        if not is_told and (ours or None) != (theirs or None):
            yield differ(name, ours, theirs, "both sides need the same.")
    for name in SAME_IN_ENV:
        ours, theirs = environment(run.training).get(name), environment(run.rollout).get(name)
        if str(ours) != str(theirs):
            why = "images would have other sizes, and prompts other ids, on the two sides."
            yield differ(name, ours, theirs, why, "(ENV) ")
    rank, most = run.train("lora_rank"), run.serve("vllm_max_lora_rank")
    if run.serve("vllm_enable_lora") and rank > most:
        yield error("vllm_max_lora_rank", f"{most} is less than the training's lora_rank {rank}.")


def serves_gym(run: Run) -> bool:
    """Whether the servers' schedulers run a gym, whose reward counts."""
    told = run.serve("use_gym_env")
    return bool(run.serve("gym_env") if told is None else told)


Rules = list[Callable[[Run], Findings]]
RULES: Rules = [check_plugins, check_parallel, check_devices, check_servers, check_agreement]
TRAINING_RULES: Rules = [check_algorithm, check_rewards, check_groups, check_steps]
TRAINING_RULES += [check_engine_choice, check_lengths]
"""Those that ask for settings of `swift rlhf`."""
