"""Says before the start what `--full_determinism true` cannot keep with the other settings.

It promises the same tokens, losses and weights in each run of a command, also in one that was
interrupted and resumed (docs/seeds.md). What a server has to be given for it, the training asks of
each (`server/client.py`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import Findings, error, warning
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.determinism import CUBLAS, CUBLAS_VALUES

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments

SETTING = "full_determinism true"


def check_determinism(args: RLHFArguments) -> Findings:
    """Refuse what torch would refuse at the first product, and warn of what parts two runs, or a
    resumed one from the other.

    What a checkpoint of ms-swift 4.6 does not hold: the reference model that `--sync_ref_model` has
    moved, and the batch that `--async_generate` had on its way (rollout_mixin.py, `_prefetch`).
    """
    if not args.full_determinism:
        return
    given = os.environ.get(CUBLAS)
    # torch raises at the first product of matrices on CUDA with another value (`prepare_process`
    # sets a good one where there is none).
    if given is not None and given not in CUBLAS_VALUES and has_accelerator():
        yield error(
            SETTING,
            f"found {CUBLAS}={given} in the environment; expected {' or '.join(CUBLAS_VALUES)}, "
            "with which cuBLAS sums in one order.",
            "Leave it out: it is set by itself.",
        )
    if args.use_vllm and args.rollout_seed_mode == "engine":
        text = "is not kept with --rollout_seed_mode engine: its generators start over in a resumed"
        yield warning(SETTING, f"{text} run, and servers draw seeds.", "Leave the mode out.")
    resumes = {
        "sync_ref_model true": (
            args.sync_ref_model,
            "the reference that training has moved is in no checkpoint, and is the model's again.",
        ),
        "async_generate true": (
            args.async_generate,
            "the batch that was on its way when a checkpoint was written is generated again, with "
            "newer weights.",
        ),
        "save_only_model true": (
            args.save_only_model,
            "a checkpoint does not hold the optimizer's state.",
        ),
    }
    for name, (is_set, reason) in resumes.items():
        if is_set:
            text = f"does not hold for a resumed run with --{name}: {reason}"
            yield warning(SETTING, text, "Leave it out, or do not resume.")


def check_checkpoints(args: RLHFArguments) -> Findings:
    """Warn of checkpoints between the updates that one rollout serves: a resumed run generates it
    again, with newer weights."""
    made = args.training_args
    if not args.full_determinism or made.save_strategy != "steps" or made.save_steps < 1:
        return
    # One rollout serves so many micro-batches, each of them `num_iterations` times (ms-swift 4.6,
    # grpo_trainer.py, `generate_every`).
    per_round = made.steps_per_generation * args.sequence_parallel_size * made.num_iterations
    updates = per_round / made.gradient_accumulation_steps
    if made.save_steps % updates:
        yield warning(
            SETTING,
            f"does not hold for a run that is resumed from any checkpoint: one rollout serves "
            f"{updates:g} updates, and --save_steps {made.save_steps:g} saves between them. The "
            "resumed run generates it again, with newer weights.",
            f"Set --save_steps to a multiple of {updates:g}.",
        )
