"""Rules that the settings of a run must keep to hold together. Nothing else is looked at.

Here is what would fail late, with servers up and GPUs taken, or silently. ms-swift 4.6 connects to
servers first (arguments/rlhf_args.py, `_init_external_vllm`), and counts batches after that.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Any

from swift_grpo_ext.checks.finding import Findings, error, note, warning
from swift_grpo_ext.checks.preflight import check_round
from swift_grpo_ext.registry import TRAINERS
from swift_grpo_ext.tools.check.glance import COMMANDS, plugins_of
from swift_grpo_ext.tools.check.settings import Run, devices_of, environment

PLUGIN = "grpo_ext.py"

SAME_ON_BOTH_SIDES = (
    "model",
    "model_type",
    "template",
    "torch_dtype",
    "new_special_tokens",
    "agent_template",
    "response_prefix",
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
                f"`{COMMANDS[side]}` does not load {PLUGIN}: `swift-grpo-ext plugin-path` tells "
                "where the installed one is.",
            )
    if run.training is not None:
        yield from check_training(run)
    if run.has_servers:
        yield from check_servers(run)
    if run.training is not None and run.rollout is not None:
        yield from check_agreement(run)


def check_training(run: Run) -> Findings:
    """Refuse a training without rewards or with groups that do not fit, and say what a round is."""
    algorithm = run.train("rlhf_type")
    if algorithm not in TRAINERS:
        yield error("rlhf_type", f"is {algorithm}; expected {' or '.join(TRAINERS)}.")
    # ms-swift's trainer says so once the model is loaded. A gym rewards too, and servers may run
    # one that the training's settings do not tell.
    rewarding = ("reward_funcs", "reward_model", "teacher_model", "teacher_model_server")
    is_rewarded = any(map(run.train, (*rewarding, "use_gym_env", "gym_env")))
    if algorithm == "grpo" and not is_rewarded and not (run.has_servers and may_serve_gym(run)):
        yield error("reward_funcs", "is missing: name at least one reward function.")
    problems = [*check_round(run.arguments("training"), run.num_ranks)]
    yield from problems
    if not problems:
        batch = run.batch()
        yield note(
            "num_generations",
            f"a round is {batch.generation_batch_size} samples ({run.num_ranks} ranks x "
            f"per_device_train_batch_size {batch.per_device_train_batch_size} x "
            f"{batch.steps_per_generation} steps_per_generation): "
            f"{batch.generation_batch_size // batch.num_generations} prompts of "
            f"{batch.num_generations}.",
        )
    parallel = run.train("vllm_tensor_parallel_size")
    if not run.has_servers and run.train("use_vllm") and run.num_ranks % parallel:
        yield error(
            "vllm_tensor_parallel_size",
            f"{parallel} does not divide the {run.num_ranks} training ranks: an engine is spread "
            "over as many of them (NPROC_PER_NODE x NNODES in ENV).",
        )
    prompt = run.train("max_length")
    if run.train("truncation_strategy") != "delete" and prompt:
        yield warning(
            "truncation_strategy",
            f"left cuts prompts beyond --max_length {prompt} at their beginning, where the system "
            "prompt and the question stand, and keeps their images: set delete, which replaces "
            "prompts that are too long.",
        )


def may_serve_gym(run: Run) -> bool:
    """Return whether the servers run a gym; True where nothing is known of them."""
    return run.rollout is None or bool(run.serve("use_gym_env") or run.serve("gym_env"))


def check_servers(run: Run) -> Findings:
    """Refuse addresses at which a training would wait for ever, or for the wrong server, and a GPU
    that both sides name."""
    hosts, ports = run.train("vllm_server_host") or (), run.train("vllm_server_port")
    addresses = run.train("vllm_server_base_url")
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
            f"{run.serve('port')} of `swift rollout` is not among vllm_server_port "
            f"({', '.join(map(str, ports))}) of `swift rlhf`.",
        )
    shared = sorted({*devices_of(run.training)} & {*devices_of(run.rollout)})
    if shared and not environment(run.training).get("NNODES"):
        text = f"GPU {', '.join(shared)} is named by both sides: share the GPUs out."
        yield error("CUDA_VISIBLE_DEVICES", text)


def check_agreement(run: Run) -> Findings:
    """Refuse two sides that do not mean the same model, prompts and pixels."""
    training = run.training or {}
    rollout = {"use_gym_env": may_serve_gym(run), **(run.rollout or {})}
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in (*SAME_ON_BOTH_SIDES, *SAME_WHERE_GIVEN):
        ours, theirs = training.get(name) or None, rollout.get(name) or None
        follows = SAME_WHERE_GIVEN.get(name)
        is_taken_over = follows and (ours if follows == "training" else theirs) is None
        if not is_taken_over:
            pairs[name] = (ours, theirs)
    for name in SAME_IN_ENV:
        pairs[f"ENV {name}"] = (environment(training).get(name), environment(rollout).get(name))
    for name, (ours, theirs) in pairs.items():
        if str(ours) != str(theirs):
            shown = ["not set" if value is None else repr(value) for value in (ours, theirs)]
            yield error(
                name,
                f"is {shown[0]} of `swift rlhf` and {shown[1]} of `swift rollout`: both sides need "
                "the same.",
            )
    rank, most = run.train("lora_rank"), run.serve("vllm_max_lora_rank")
    if run.serve("vllm_enable_lora") and rank > most:
        yield error("vllm_max_lora_rank", f"{most} is less than the training's lora_rank {rank}.")
