"""Rows that no batch ever holds: said before the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import Findings, error, warning

if TYPE_CHECKING:
    from collections.abc import Sized

    from swift.arguments import RLHFArguments


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
