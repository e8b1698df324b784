"""The arguments of a training, as ms-swift hands them to its trainer, with our flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from swift.rlhf_trainers import GRPOConfig

from swift_grpo_ext.flags import ExtFlags


@dataclass
class RolloutGRPOConfig(ExtFlags, GRPOConfig):
    """ms-swift's training arguments for GRPO with our flags."""

    new_special_tokens: list[str] = field(default_factory=list)
    """ms-swift's own flag; servers must have been given the same tokens."""
