"""Extends ms-swift's trainers; `rollouts` follows the order of a round."""

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import verify, verify_overrides

verify(pins.TRAINER)  # before classes build on it

from swift_grpo_ext.training.distillation import RolloutGKDTrainer  # noqa: E402
from swift_grpo_ext.training.trainer import RolloutGRPOTrainer  # noqa: E402

verify_overrides(RolloutGKDTrainer, RolloutGRPOTrainer)

__all__ = ["RolloutGKDTrainer", "RolloutGRPOTrainer"]
