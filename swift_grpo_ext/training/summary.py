"""A training's log says at its start what the plugin does in it."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING

from swift.utils import get_logger

from swift_grpo_ext.record.recorder import view_command
from swift_grpo_ext.training.gap import sampling_shift
from swift_grpo_ext.version import __version__

if TYPE_CHECKING:
    from swift_grpo_ext.training.rollouts import RolloutTraining

logger = get_logger()


def log_what_is_on(trainer: RolloutTraining, num_dropouts: int) -> None:
    """Log on rank 0 whether each mechanism is on, and how to look at the run."""
    if trainer.ranks.rank:
        return
    args, shares = trainer.args, trainer.completion_logps.shares_prompts
    is_seeded = args.use_vllm and args.rollout_seed_mode == "sample"
    read = "once a group where that saves time" if shares else "for each sample"
    watches = "diversity" in args.callbacks
    states = [
        "a seed for each sample" if is_seeded else "ms-swift's own seeds and requests",
        f"training reads prompts {read}",
        *([f"{num_dropouts} dropouts are off (--lora_dropout is ignored)"] if num_dropouts else ()),
        f"the rollout gap is {'measured' if isinf(sampling_shift(args)) else 'held to a limit'}",
        "diversity is watched" if watches else "diversity is not watched (--callbacks diversity)",
        "no record" if args.sample_log == "none" else "samples are recorded",
    ]
    view = view_command(args.output_dir)
    logger.info(f"swift-grpo-ext {__version__}: {'; '.join(states)}. Look at it meanwhile: {view}")
