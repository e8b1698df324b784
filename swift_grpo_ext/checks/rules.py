"""Rules that the settings of a run must keep to hold together. Pure: nothing else is looked at.

Where ms-swift has a check of its own, the rule is the same, met before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from swift_grpo_ext.checks.engines import (
    check_agreement,
    check_devices,
    check_engine_choice,
    check_lengths,
    check_parallel,
    check_servers,
    serves_gym,
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
from swift_grpo_ext.checks.settings import Run
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE

ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""The DeepSpeed configurations that ms-swift ships; anything else is a file's name or JSON."""

PLUGIN = "grpo_ext.py"


def check(run: Run) -> list[Finding]:
    """All that is to be said about a run's settings alone, errors first."""
    found = list(run.unread)
    if not any(finding.level == "error" for finding in found):  # else there is nothing to count
        found += [finding for rule in RULES for finding in rule(run)]
    return errors_first(found)


def errors_first(findings: list[Finding]) -> list[Finding]:
    order = ("error", "warning", "note", "ok")
    return sorted(findings, key=lambda finding: order.index(finding.level))


# --- what is trained, and for what ---


def check_algorithm(run: Run) -> Findings:
    if run.training is None:
        return
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


def check_plugins(run: Run) -> Findings:
    for side, settings in run.sides:
        names = [PurePath(plugin).name for plugin in settings.get("external_plugins") or ()]
        if PLUGIN not in names:
            yield error(
                "external_plugins",
                f"{run.name(side)} does not load {PLUGIN}: `swift-grpo-ext plugin-path` tells "
                "where the installed one is.",
            )


def check_stop_words(run: Run) -> Findings:
    if "" in run.train("stop_words"):
        yield error("stop_words", "holds an empty string, which would end every completion.")


def check_rewards(run: Run) -> Findings:
    """Something rewards: a function, a model, a gym, or a teacher (grpo_trainer.py)."""
    if run.training is None:
        return
    rewards = [*(run.train("reward_funcs") or ()), *(run.train("reward_model") or ())]
    if _has_gym(run):
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


def _has_gym(run: Run) -> bool:
    """Whether a gym's reward counts: as the training says, else as its servers do."""
    if run.train("use_gym_env") is not None:
        return bool(run.train("use_gym_env"))
    return bool(run.train("gym_env")) or (run.has_servers and serves_gym(run))


# --- batches and groups ---


def check_groups(run: Run) -> Findings:
    if run.training is None:
        return
    size, batch = run.train("num_generations"), run.generation_batch
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
    if (run.training.get("eval_strategy") or run.train("save_strategy")) == "no":
        return
    eval_size = run.train("num_generations_eval") or size
    eval_batch = run.train("per_device_eval_batch_size") * run.num_ranks
    if eval_size > 0 and eval_batch % eval_size:
        yield error(
            "per_device_eval_batch_size",
            f"{run.num_ranks} ranks x {run.train('per_device_eval_batch_size')} = {eval_batch} "
            f"samples cannot be shared by groups of {eval_size} (num_generations_eval, or "
            'num_generations): change one of them, or set eval_strategy: "no".',
        )


def check_steps(run: Run) -> Findings:
    """How rounds and optimizer steps lie to one another."""
    if run.training is None:
        return
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


def _batch(run: Run) -> str:
    """How a generation batch comes about."""
    if run.train("generation_batch_size") is not None:
        return "generation_batch_size"
    return (
        f"{run.num_ranks} ranks x per_device_train_batch_size "
        f"{run.train('per_device_train_batch_size')} x {run.steps_per_generation} "
        "steps_per_generation"
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
)
