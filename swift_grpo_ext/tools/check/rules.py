"""Rules that the settings of a run must keep to hold together. Pure: nothing else is looked at.

What ms-swift refuses as it parses a command line is left to it. Here is what would fail late, with
servers up and GPUs taken, or silently. Connecting to servers comes first in ms-swift 4.6
(arguments/rlhf_args.py, `_init_external_vllm`): batches are counted after that.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Any

from swift_grpo_ext.checks.finding import Finding, Findings, error, note, warning
from swift_grpo_ext.tools.check.settings import Run, devices_of, environment, plugins_of

PLUGIN = "grpo_ext.py"

SAME_ON_BOTH_SIDES = (
    "model",
    "model_type",
    "template",
    "torch_dtype",
    "new_special_tokens",
    "agent_template",
    "response_prefix",
    "vllm_enable_lora",
)
SAME_WHERE_GIVEN = {
    "system": "rollout",  # travels with each request
    # A training asks its servers (ms-swift 4.6, rlhf_trainers/rollout_mixin.py:421).
    "multi_turn_scheduler": "training",
    "max_turns": "training",
    "use_gym_env": "training",
}
"""Settings that one side takes from the other where it does not say so itself: which side does."""

SAME_IN_ENV = ("MAX_PIXELS", "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_PIXELS", "FPS")
"""What images become on either side: other values, other prompt ids."""


def check_settings(run: Run) -> Findings:
    """Say all that is to be said about a run's settings alone."""
    for side, settings in run.sides:
        if PLUGIN not in (PurePath(plugin).name for plugin in plugins_of(settings)):
            yield error(
                "external_plugins",
                f"{run.name(side)} does not load {PLUGIN}: `swift-grpo-ext plugin-path` tells "
                "where the installed one is.",
            )
    if run.training is not None:
        yield from check_rewards(run)
        yield from check_groups(run)
        yield from check_engines(run)
    yield from check_gpu_counts(run)
    if run.has_servers:
        yield from check_servers(run)
    if run.training is not None and run.rollout is not None:
        yield from check_agreement(run)


def check_rewards(run: Run) -> Findings:
    """Refuse a training without rewards, which ms-swift's trainer would do once the model is
    loaded."""
    if run.train("rlhf_type") != "grpo":
        yield error("rlhf_type", f"is {run.train('rlhf_type')}; expected grpo.")
    rewards = [*(run.train("reward_funcs") or ()), *(run.train("reward_model") or ())]
    # A gym rewards too, and servers may run one that the training's settings do not tell.
    may_have_gym = run.train("use_gym_env")
    if may_have_gym is None:
        may_have_gym = run.train("gym_env") or (run.has_servers and may_serve_gym(run))
    if may_have_gym:
        return
    if not rewards and not run.train("teacher_model") and not run.train("teacher_model_server"):
        yield error("reward_funcs", "is missing: name at least one reward function.")
    weights = run.train("reward_weights")
    if weights is not None and len(weights) != len(rewards):
        yield error(
            "reward_weights",
            f"has {len(weights)} values for {len(rewards)} rewards ({', '.join(rewards)}): give "
            "one for each.",
        )


def may_serve_gym(run: Run) -> bool:
    """Return whether the servers run a gym; True where nothing is known of them."""
    return run.rollout is None or bool(run.serve("use_gym_env") or run.serve("gym_env"))


def check_groups(run: Run) -> Findings:
    """Say what a round is, and refuse batches that groups do not fill (args_mixin.py,
    `_init_generation_batch_params`)."""
    size, batch, ranks = run.train("num_generations"), run.generation_batch, run.num_ranks
    of_rank, eval_of_rank = (run.train(f"per_device_{s}_batch_size") for s in ("train", "eval"))
    if run.train("generation_batch_size") is not None:
        source = "generation_batch_size"
    else:
        source = f"{ranks} ranks x per_device_train_batch_size {of_rank} x "
        source += f"{run.steps_per_generation} steps_per_generation"
    if batch % run.global_batch:
        yield error(
            "generation_batch_size",
            f"{batch} is no multiple of {run.global_batch} ({ranks} ranks x "
            f"per_device_train_batch_size {of_rank}).",
        )
    if size < 1 or batch % size:
        fitting = ", ".join(str(n) for n in range(2, min(batch, 256) + 1) if batch % n == 0)
        yield error(
            "num_generations",
            f"{size} does not divide the {batch} samples of a generation batch ({source}): take "
            f"one of {fitting}, or another batch.",
        )
    else:
        text = f"a round is {batch} samples ({source}): {batch // size} prompts of {size}."
        yield note("num_generations", text)
    evaluates = ((run.training or {}).get("eval_strategy") or run.train("save_strategy")) != "no"
    eval_size, eval_batch = run.train("num_generations_eval") or size, eval_of_rank * ranks
    if evaluates and eval_size > 0 and eval_batch % eval_size:
        yield error(
            "per_device_eval_batch_size",
            f"{ranks} ranks x {eval_of_rank} = {eval_batch} samples cannot be shared by groups of "
            f"{eval_size} (num_generations_eval, or num_generations): change one of them, or set "
            'eval_strategy: "no".',
        )


def check_engines(run: Run) -> Findings:
    """Check the engines' room for prompts and completions, and colocated engines' ranks."""
    parallel = run.train("vllm_tensor_parallel_size")
    if not run.has_servers and run.train("use_vllm") and run.num_ranks % parallel:
        yield error(
            "vllm_tensor_parallel_size",
            f"{parallel} does not divide the {run.num_ranks} training ranks: an engine is spread "
            "over as many of them (NPROC_PER_NODE x NNODES in ENV).",
        )
    prompt, turns = run.train("max_length"), run.train("max_turns") or 1
    if run.train("truncation_strategy") != "delete" and prompt:
        yield warning(
            "truncation_strategy",
            "left cuts prompts for the training that the rollout saw whole, and images with them: "
            "set delete, which replaces prompts that are too long.",
        )
    room = ((run.rollout if run.has_servers else run.training) or {}).get("vllm_max_model_len")
    if not run.train("use_vllm") or room is None:
        return
    # vLLM takes such requests: ms-swift cuts their completions short, and only logs it
    # (infer_engine/infer_engine.py, `set_default_max_tokens`).
    completion = turns * run.train("max_completion_length")
    if room < (prompt or 0) + completion:
        several = f"{turns} turns of " if turns > 1 else ""
        yield warning(
            "vllm_max_model_len",
            f"{room} is less than max_length {prompt or 'not set'} + {several}"
            f"max_completion_length {run.train('max_completion_length')} = "
            f"{(prompt or 0) + completion}: completions of long prompts will be cut short.",
        )


def check_gpu_counts(run: Run) -> Findings:
    """Refuse another number of GPUs than processes use, and a GPU that both sides name."""
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
        text = f"GPU {', '.join(shared)} is named by both sides: share the GPUs out."
        yield error("CUDA_VISIBLE_DEVICES", text)


def check_servers(run: Run) -> Findings:
    """Refuse addresses at which a training would wait for ever, or for the wrong server."""
    hosts, ports = run.train("vllm_server_host") or (), run.train("vllm_server_port")
    addresses = run.train("vllm_server_base_url")
    if not addresses and len(hosts) != len(ports):
        yield error(
            "vllm_server_port",
            f"{len(ports)} ports for {len(hosts)} servers (vllm_server_host): give one for each.",
        )
    addresses = addresses or [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    for address, times in Counter(addresses).items():
        if times > 1:
            text = f"{address} is given for {times} servers: each has its own."
            yield error("vllm_server_port", text)
    group_ports = run.train("vllm_server_group_port") or ()
    ends = Counter(zip(hosts or addresses, group_ports, strict=False))
    if any(times > 1 for times in ends.values()):
        yield error("vllm_server_group_port", "holds one port twice for one host.")
    if run.rollout is not None and hosts and run.serve("port") not in ports:
        yield error(
            "port",
            f"{run.serve('port')} of {run.name('rollout')} is not among vllm_server_port "
            f"({', '.join(map(str, ports))}) of {run.name('training')}.",
        )


def check_agreement(run: Run) -> Findings:
    """Refuse two sides that do not mean the same model, prompts and pixels."""

    def differ(name: str, ours: Any, theirs: Any, why: str) -> Finding:
        shown = ["not set" if value is None else repr(value) for value in (ours, theirs)]
        text = f"is {shown[0]} in {run.name('training')} and {shown[1]} in {run.name('rollout')}"
        return error(name, f"{text}: {why}")

    training = run.training or {}
    rollout = {"use_gym_env": may_serve_gym(run), **(run.rollout or {})}
    for name in (*SAME_ON_BOTH_SIDES, *SAME_WHERE_GIVEN):
        ours, theirs = training.get(name) or None, rollout.get(name) or None
        follower = SAME_WHERE_GIVEN.get(name)
        is_taken_over = (ours if follower == "training" else theirs) is None
        if ours != theirs and not (follower and is_taken_over):
            yield differ(name, ours, theirs, "both sides need the same.")
    for name in SAME_IN_ENV:
        ours, theirs = environment(training).get(name), environment(rollout).get(name)
        if str(ours) != str(theirs):
            why = "images would have other sizes, and prompts other ids, on the two sides."
            yield differ(f"ENV {name}", ours, theirs, why)
    rank, most = run.train("lora_rank"), run.serve("vllm_max_lora_rank")
    if run.serve("vllm_enable_lora") and rank > most:
        yield error("vllm_max_lora_rank", f"{most} is less than the training's lora_rank {rank}.")
