"""ms-swift's GRPO trainer, extended: `prompts` before a round, `rollouts` in it, `batch` after."""

from swift_grpo_ext.training.trainer import RolloutGRPOConfig, RolloutGRPOTrainer

__all__ = ["RolloutGRPOConfig", "RolloutGRPOTrainer"]
