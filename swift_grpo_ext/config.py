"""The training arguments that ms-swift passes to its trainer, with our flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from swift.rlhf_trainers import GKDConfig, GRPOConfig

from swift_grpo_ext.flags import ExtFlags


@dataclass
class RolloutGRPOConfig(ExtFlags, GRPOConfig):
    """ms-swift's training arguments for GRPO with our flags."""

    new_special_tokens: list[str] = field(default_factory=list)
    """ms-swift's own flag; servers need the same tokens."""


@dataclass
class RolloutGKDConfig(ExtFlags, GKDConfig):
    """ms-swift's training arguments for distillation (GKD) with our flags."""

    new_special_tokens: list[str] = field(default_factory=list)

    # Arguments of GRPO, with the fixed values that they have in distillation.
    num_generations: ClassVar[int] = 1
    num_iterations: ClassVar[int] = 1
    dynamic_sample: ClassVar[bool] = False
    multi_turn_scheduler: ClassVar[None] = None
