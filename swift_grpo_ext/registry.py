"""Registers the plugin with ms-swift: in its registries, and by repairs (`upstream/patches.py`)."""

from __future__ import annotations

import sys
from functools import cache

from swift_grpo_ext.checks.finding import hide_tracebacks
from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import tried_packages, untried, verify, verify_overrides
from swift_grpo_ext.upstream.patches import PatchPhase, apply

TRAINERS = {
    "grpo": "swift_grpo_ext.training.RolloutGRPOTrainer",
    "gkd": "swift_grpo_ext.training.RolloutGKDTrainer",
}
TRAINING_ARGUMENTS = {
    "grpo": "swift_grpo_ext.config.RolloutGRPOConfig",
    "gkd": "swift_grpo_ext.config.RolloutGKDConfig",
}
"""Both map `--rlhf_type` to our classes."""


@cache
def register() -> None:
    """Make ms-swift use our flags, trainers, engine, server and callback; once in a process."""
    hide_tracebacks()
    verify(pins.COMMAND_LINE)

    # Only once ms-swift is verified: these modules build on its classes.
    import swift.utils
    from swift.callbacks import callbacks_map
    from swift.trainers import TrainerFactory

    from swift_grpo_ext.monitor import DiversityMonitor

    verify_overrides(DiversityMonitor)
    if news := untried(tried_packages()):
        swift.utils.get_logger().warning(
            f"swift-grpo-ext was not tried with {', '.join(news)}. All names that it uses exist "
            "there; `swift-grpo-ext selftest` checks its promises on this machine."
        )
    if not has_accelerator():
        from swift_grpo_ext import cpu

        cpu.register()  # before the first repairs
    apply(PatchPhase.REGISTRATION)
    # By name: a server never imports these modules.
    TrainerFactory.TRAINER_MAPPING.update(TRAINERS)
    TrainerFactory.TRAINING_ARGS_MAPPING.update(TRAINING_ARGUMENTS)
    callbacks_map["diversity"] = DiversityMonitor
    # `swift rollout` loads this module before it imports plugins. A trainer sets the engine itself.
    if "swift.pipelines.infer.rollout" in sys.modules:
        apply(PatchPhase.SERVER)
