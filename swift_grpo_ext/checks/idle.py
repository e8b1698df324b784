"""Settings with which nothing is trained, and rows that no batch ever holds: said before the start.

What only rewards and completions tell is said in the run (training/summary.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import Findings, error, warning

if TYPE_CHECKING:
    from collections.abc import Sized

    from swift.arguments import RLHFArguments


def check_idle_settings(args: RLHFArguments) -> Findings:
    """Warn of settings with which no weight ever changes."""
    # Tower and aligner follow the model's rate unless they have their own.
    if args.learning_rate == 0 and not args.vit_lr and not args.aligner_lr:
        yield warning("learning_rate 0", "no weight changes: nothing is trained.")
    # A teacher's log-probabilities are a signal of their own.
    weights = [float(weight) for weight in args.reward_weights or ()]
    teachers = ("teacher_model", "teacher_model_server")
    has_teacher = any(getattr(args, name, None) for name in teachers)
    if weights and not any(weights) and not has_teacher:
        yield warning(
            f"reward_weights {' '.join(f'{weight:g}' for weight in weights)}",
            "all rewards are equal, whatever functions say, and advantages are 0.",
            "Give one of them a weight.",
        )
    if args.num_train_epochs == 0 and args.max_steps <= 0:
        yield warning("num_train_epochs 0", "no step is made (--max_steps is not given).")


def group_size(args: RLHFArguments) -> int:
    """Return how many samples a prompt has: distillation has no groups."""
    return int(args.num_generations) if args.rlhf_type == "grpo" else 1


def check_unmet_rows(args: RLHFArguments, train: Sized, evaluation: Sized | None) -> Findings:
    """Warn of rows that no batch holds: ms-swift leaves out what fills none (4.6,
    rlhf_trainers/arguments.py:121, `dataloader_drop_last`)."""
    settings = args.training_args
    prompts = settings.generation_batch_size // group_size(args)
    tail = len(train) % prompts
    # Shuffled rows are left out in turn; fewer than a batch are an error (`check_datasets`).
    if tail and not getattr(settings, "dataset_shuffle", True) and len(train) > prompts:
        yield warning(
            "dataset_shuffle false",
            f"the last {tail} of {len(train)} rows of --dataset are never trained on: generation "
            f"batches hold {prompts} prompts, and what fills none is left out, the same in each "
            "epoch.",
            f"Add {prompts - tail} rows, or let rows be shuffled.",
        )
    if settings.eval_strategy == "no" or settings.eval_use_evalscope:
        if args.val_dataset:
            given = " ".join(map(str, args.val_dataset))
            yield warning(
                f"val_dataset {given}",
                "is never evaluated: --eval_strategy is `no`, which it is where it is not given "
                "and --save_strategy is.",
                "Give --eval_strategy steps, or leave it out.",
            )
        return
    if evaluation is None:
        return
    # An evaluation step holds so many samples over all ranks, `group` of them of each row.
    group = (args.rlhf_type == "grpo" and args.num_generations_eval) or group_size(args)
    prompts = settings.per_device_eval_batch_size * settings.world_size // group
    num_rows, tail = len(evaluation), len(evaluation) % max(prompts, 1)
    setting = "val_dataset" if args.val_dataset else "split_dataset_ratio"
    batch = (
        f"evaluation batches hold {prompts} prompts (--per_device_eval_batch_size "
        f"{settings.per_device_eval_batch_size} x {settings.world_size} ranks / {group} samples)"
    )
    if num_rows < prompts:
        text = f"{num_rows} rows make no batch: {batch}."
        yield error(setting, text, "Add rows, or make the batch smaller.")
    elif tail:
        yield warning(
            setting,
            f"{tail} of {num_rows} rows are left out of each evaluation: {batch}, and what fills "
            "none is left out.",
            f"Add {prompts - tail} rows, or choose a batch that divides {num_rows}.",
        )
