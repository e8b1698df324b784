"""Rules that settings must keep to hold together. Pure.

An `error` does not run, or trains something else than it says; a `warning` is ignored, wasteful or
a likely slip; a `note` is worth knowing. Where ms-swift has a check of its own, the rule is the
same, met before a model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePath

from swift_grpo_ext.checks.engines import (
    check_agreement,
    check_devices,
    check_engine_choice,
    check_lengths,
    check_parallel,
    check_servers,
)
from swift_grpo_ext.checks.finding import (
    Finding,
    Findings,
    divisors,
    error,
    note,
    warning,
    words,
)
from swift_grpo_ext.checks.memory import estimate_rollout, estimate_training, known_model
from swift_grpo_ext.checks.presets import DEFAULTS, Run, as_list
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE

ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""The DeepSpeed configurations that ms-swift ships; anything else is a file's name or JSON."""

NUMBERS = (
    *(name for name, value in DEFAULTS.items() if type(value) in (int, float)),
    *("num_generations_eval", "generation_batch_size", "steps_per_generation", "max_length"),
    *("gradient_accumulation_steps", "max_turns", "vllm_max_model_len", "vllm_server_port"),
    *("vllm_server_group_port", "port", "beta"),
)
PLUGIN = "grpo_ext.py"


def check(run: Run) -> list[Finding]:
    """All that is to be said about a run's settings, errors first."""
    found = [*check_yaml(run), *check_numbers(run)]
    if not any(finding.level == "error" for finding in found):  # else there is nothing to count
        found += [finding for rule in RULES for finding in rule(run)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


# --- each side by itself ---


def check_yaml(run: Run) -> Findings:
    """Values that YAML turns into something else than was meant."""
    for side in (run.training, run.rollout):
        for name, value in (side or {}).items():
            if value is None:
                yield error(name, "is empty, and arrives as the text 'None': leave the line out.")
            elif value == []:
                yield error(name, "is an empty list, which ms-swift refuses: leave the line out.")
            elif value is False and name in ("eval_strategy", "save_strategy", "report_to"):
                yield error(name, 'is a boolean: YAML reads `no` and `off` so. Write "no".')


def check_numbers(run: Run) -> Findings:
    for side in (run.training, run.rollout):
        for name in NUMBERS:
            for value in as_list((side or {}).get(name)):
                if isinstance(value, bool) or not re.fullmatch(r"[+-]?[\d.]+(e-?\d+)?", str(value)):
                    yield error(name, f"is {value!r}; expected a number.")


def check_algorithm(run: Run) -> Findings:
    if run.training is None:
        return
    if run.train("rlhf_type") != "grpo":
        yield error("rlhf_type", f"is {run.train('rlhf_type')}; expected grpo.")
    if run.train("truncation_strategy") not in (None, "left", "delete"):
        value = run.train("truncation_strategy")
        yield error("truncation_strategy", f"is {value}; GRPO takes left or delete.")
    if run.train("truncation_strategy") != "delete" and run.train("max_length"):
        yield warning(
            "truncation_strategy",
            "left cuts prompts for the training that the rollout saw whole, and images with them: "
            "set delete, which replaces prompts that are too long.",
        )
    if run.train("async_generate") and run.train("multi_turn_scheduler"):
        yield error("async_generate", "does not work with multi_turn_scheduler: leave one out.")
    deepspeed = run.train("deepspeed")
    looks_like_file = isinstance(deepspeed, str) and deepspeed.endswith(".json")
    if isinstance(deepspeed, str) and not looks_like_file and deepspeed not in ZERO:
        yield error("deepspeed", f"is {deepspeed}; expected a JSON file or one of {words(ZERO)}.")


def check_plugins(run: Run) -> Findings:
    for side, settings in (("training", run.training), ("rollout", run.rollout)):
        if settings is None:
            continue
        names = [PurePath(str(p)).name for p in as_list(settings.get("external_plugins"))]
        if PLUGIN not in names:
            yield error(
                "external_plugins",
                f"{run.name(side)} does not load {PLUGIN}: `swift-grpo-ext plugin-path` tells "
                "where the installed one is.",
            )


def check_stop_words(run: Run) -> Findings:
    for word in as_list(run.train("stop_words")):
        if not isinstance(word, str):
            yield error("stop_words", f"holds {word!r}, which is no text: quote it.")
        elif word == "":
            yield error("stop_words", "holds an empty string, which would end every completion.")


def check_rewards(run: Run) -> Findings:
    if run.training is None:
        return
    functions, models = as_list(run.train("reward_funcs")), as_list(run.train("reward_model"))
    weights = run.train("reward_weights")
    num_rewards = len(functions) + len(models)
    if num_rewards == 0:
        yield error("reward_funcs", "is missing: name at least one reward function.")
    if weights is not None and len(as_list(weights)) != num_rewards:
        yield error(
            "reward_weights",
            f"has {len(as_list(weights))} values for {num_rewards} rewards "
            f"({words([*functions, *models])}): give one for each.",
        )


# --- batches and groups ---


def check_groups(run: Run) -> Findings:
    if run.training is None:
        return
    size, batch = int(run.train("num_generations")), run.generation_batch
    if not 2 <= size <= MAX_GROUP_SIZE:
        yield error("num_generations", f"is {size}; expected 2 to {MAX_GROUP_SIZE}.")
    elif batch % size:
        yield error(
            "num_generations",
            f"{size} does not divide the {batch} samples of a generation batch ({_batch(run)}): "
            f"take one of {words(divisors(batch))}, or another batch.",
        )
    else:
        text = f"a round is {batch} samples ({_batch(run)}): {batch // size} prompts of {size}."
        yield note("num_generations", text)
    if run.training.get("eval_strategy", run.train("save_strategy")) in ("no", False):
        return
    eval_size = int(run.train("num_generations_eval") or size)
    eval_batch = int(run.train("per_device_eval_batch_size")) * run.num_ranks
    if eval_size > 0 and eval_batch % eval_size:
        yield error(
            "per_device_eval_batch_size",
            f"{run.num_ranks} ranks x {run.train('per_device_eval_batch_size')} = {eval_batch} "
            f"samples cannot be shared by groups of {eval_size} (num_generations_eval, or "
            'num_generations): change one of them, or set eval_strategy: "no".',
        )


def check_steps(run: Run) -> Findings:
    """Rounds and optimizer steps begin together."""
    if run.training is None:
        return
    size, steps = run.train("generation_batch_size"), run.train("steps_per_generation")
    if size is not None and int(size) % run.global_batch:
        yield error(
            "generation_batch_size",
            f"{size} is no multiple of {run.global_batch} ({run.num_ranks} ranks x "
            f"per_device_train_batch_size {run.train('per_device_train_batch_size')}).",
        )
    if size is not None and steps is not None and int(size) != run.global_batch * int(steps):
        yield error(
            "generation_batch_size",
            f"{size} is not {run.global_batch} x steps_per_generation {steps}: set one of the two.",
        )
    accumulation, serves = int(run.train("gradient_accumulation_steps")), run.steps_per_generation
    if serves < 1 or accumulation < 1:
        yield error("steps_per_generation", "and gradient_accumulation_steps: expected 1 or more.")
    elif serves % accumulation and accumulation % serves:
        yield error(
            "steps_per_generation",
            f"{serves} and gradient_accumulation_steps {accumulation}: one must be a multiple of "
            "the other, or a round ends in the middle of an optimizer step.",
        )
    elif serves > accumulation:
        yield note(
            "steps_per_generation",
            f"a round serves {serves // accumulation} optimizer steps: all but the first train on "
            "samples of older weights.",
        )


# --- memory ---


def check_memory(run: Run) -> Findings:
    """An estimate in words, and a warning where it is more than a GPU has."""
    training, serving = known_model(run.train("model")), known_model(run.serve("model"))
    if run.training is not None and training:
        yield from _memory("training", run, estimate_training(run, training))
    if run.rollout is not None and serving:
        yield from _memory("servers", run, estimate_rollout(run, serving))


def _memory(what: str, run: Run, parts: Mapping[str, float]) -> Findings:
    total = sum(parts.values())
    terms = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)
    text = f"{what}: about {total:.0f} GiB of {run.gpu_gib:g} on each GPU ({terms})."
    if total > run.gpu_gib:
        yield warning("memory", f"{text} {_smaller(parts)}")
    else:
        yield note("memory", text)


def _smaller(parts: Mapping[str, float]) -> str:
    """What to change first, by the largest part."""
    largest = max(parts, key=lambda name: parts[name])
    remedies = {
        "weights": "Spread them: deepspeed: zero3, or a larger vllm_tensor_parallel_size.",
        "gradients and optimizer": "Spread them (deepspeed: zero3), or set tuner_type: lora.",
        "logits": "Set logps_chunk_size: 512, which computes 512 positions at a time.",
        "vLLM": "Lower vllm_gpu_memory_utilization, or set sleep_level: 1.",
    }
    return remedies.get(
        largest,
        "Lower per_device_train_batch_size and raise gradient_accumulation_steps by as much, or "
        "shorten max_completion_length.",
    )


RULES: tuple[Callable[[Run], Findings], ...] = (
    check_algorithm,
    check_plugins,
    check_stop_words,
    check_rewards,
    check_groups,
    check_steps,
    check_engine_choice,
    check_parallel,
    check_devices,
    check_servers,
    check_agreement,
    check_lengths,
    check_memory,
)


def _batch(run: Run) -> str:
    """How a generation batch comes about."""
    if run.train("generation_batch_size") is not None:
        return "generation_batch_size"
    return (
        f"{run.num_ranks} ranks x per_device_train_batch_size "
        f"{run.train('per_device_train_batch_size')} x {run.steps_per_generation} "
        "steps_per_generation"
    )
