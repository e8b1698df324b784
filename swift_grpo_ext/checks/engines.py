"""Rules for engines, GPUs and servers, and for what both sides have to agree on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from swift_grpo_ext.checks.finding import Finding, Findings, error, warning, words
from swift_grpo_ext.checks.settings import Run, environment

SAME_ON_BOTH_SIDES = (
    "model",
    "model_type",
    "template",
    "torch_dtype",
    "system",
    "new_special_tokens",
    "agent_template",
    "response_prefix",
    "vllm_enable_lora",
)
FROM_SERVERS = ("multi_turn_scheduler", "max_turns")
"""What a training learns from its servers where it does not say so itself (rollout_mixin.py)."""

SAME_IN_ENV = ("MAX_PIXELS", "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_PIXELS", "FPS")
"""What images become on either side: other values, other prompt ids."""

ENGINE_SETTINGS = (
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_data_parallel_size",
    "vllm_max_model_len",
    "vllm_enforce_eager",
    "vllm_engine_kwargs",
    "vllm_limit_mm_per_prompt",
    "vllm_max_num_seqs",
)


def check_engine_choice(run: Run) -> Findings:
    if run.training is None:
        return
    mode = run.train("vllm_mode")
    if run.train("use_vllm") and mode not in ("server", "colocate"):
        yield error("vllm_mode", f"is {mode}; with use_vllm: true it is server or colocate.")
    if not run.train("use_vllm") and mode is not None:
        yield error("vllm_mode", f"is {mode}, but use_vllm is not true.")
    if run.has_servers:
        for name in ENGINE_SETTINGS:
            if name in run.training:
                yield warning(
                    name, "is ignored by swift rlhf with servers: set it for swift rollout."
                )
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
    replicas = run.serve("vllm_data_parallel_size")
    parallel = run.serve("vllm_tensor_parallel_size")
    if serving and len(serving) != replicas * parallel:
        yield error(
            "vllm_data_parallel_size",
            f"{replicas} replicas with {parallel} GPU(s) each on {len(serving)} GPUs "
            f"(CUDA_VISIBLE_DEVICES of {run.name('rollout')}): expected "
            f"{replicas * parallel}.",
        )
    shared = sorted(set(training) & set(serving))
    if shared and not environment(run.training).get("NNODES"):
        yield error(
            "CUDA_VISIBLE_DEVICES",
            f"GPU {words(shared)} is named by both sides: share the GPUs out.",
        )


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
    addresses = Counter(urls or zip(hosts, ports, strict=False))
    for address, times in addresses.items():
        if times > 1:
            name = address if urls else ":".join(map(str, address))
            yield error(
                "vllm_server_port", f"{name} is given for {times} servers: each has its own."
            )
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
    for name in SAME_ON_BOTH_SIDES:
        ours, theirs = run.training.get(name), run.rollout.get(name)
        if name == "system" and theirs is None:
            continue  # it travels with each request
        if (ours or None) != (theirs or None):
            yield _differ(run, name, ours, theirs)
    for name in FROM_SERVERS:
        ours, theirs = run.training.get(name), run.rollout.get(name)
        if ours is not None and ours != theirs:  # else the training takes the servers'
            yield _differ(run, name, ours, theirs)
    if run.train("use_gym_env") not in (None, serves_gym(run)):
        yield _differ(run, "use_gym_env", run.train("use_gym_env"), serves_gym(run))
    ours, theirs = environment(run.training), environment(run.rollout)
    for name in SAME_IN_ENV:
        if str(ours.get(name)) != str(theirs.get(name)):
            yield error(
                name,
                f"(ENV) is {_shown(ours.get(name))} in {run.name('training')} and "
                f"{_shown(theirs.get(name))} in {run.name('rollout')}: images would have other "
                "sizes, and prompts other ids, on the two sides.",
            )
    rank, most = run.train("lora_rank"), run.serve("vllm_max_lora_rank")
    if run.serve("vllm_enable_lora") and rank > most:
        yield error("vllm_max_lora_rank", f"{most} is less than the training's lora_rank {rank}.")


def check_lengths(run: Run) -> Findings:
    """vLLM has room for the longest prompt and its completion."""
    holder = run.rollout if run.has_servers else run.training
    room = (holder or {}).get("vllm_max_model_len")
    prompt, completion = run.train("max_length"), run.train("max_completion_length")
    if run.training is None or not run.train("use_vllm") or room is None:
        return
    turns = run.train("max_turns") or 1
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


def serves_gym(run: Run) -> bool:
    """Whether the servers' schedulers run a gym, whose reward counts."""
    told = run.serve("use_gym_env")
    return bool(run.serve("gym_env")) if told is None else bool(told)


def devices_of(settings: Mapping[str, Any] | None) -> list[str]:
    """The GPUs that a side's ENV names."""
    value = environment(settings).get("CUDA_VISIBLE_DEVICES")
    return [part for part in str(value).split(",") if part] if value is not None else []


def _differ(run: Run, name: str, ours: Any, theirs: Any) -> Finding:
    return error(
        name,
        f"is {_shown(ours)} in {run.name('training')} and {_shown(theirs)} in "
        f"{run.name('rollout')}: both sides need the same.",
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
