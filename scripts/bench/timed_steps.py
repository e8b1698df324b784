"""A plugin for `step.py`: times the steps of ms-swift's trainer, with this plugin or without.

Loaded after `plugins/grpo_ext.py`, or alone; with `--callbacks step_clock --reward_funcs vowels`.
Alone and without an accelerator, ms-swift cannot give weights to vLLM, whose CPU layers hold packed
ones: its trainer gets the one repair for it, vLLM's own `reload_weights`.
"""

from __future__ import annotations

from typing import Any

import torch
from step_clock import StepClock, vowels
from swift.callbacks import callbacks_map
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory

METHODS = {
    "training_step": "loss",
    "_prepare_inputs": "rest",
    "_rollout_samples": "rollout",
    "_score_completions": "scoring",
    "_prepare_batch_inputs": "batch",
    "_get_per_token_logps_and_entropies": "log-probabilities",
    "_postprocess_batch": "scoring",
    "_log_rollout": "rest",
    "_move_model_to_vllm": "weights",
}


class Vowels(ORM):
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [vowels(completion) for completion in completions]


class PlainTrainer(GRPOTrainer):
    """ms-swift's own trainer, which can give weights to vLLM without an accelerator."""

    def _load_state_dict_to_vllm(self, state_dict: dict[str, torch.Tensor]) -> None:
        if torch.accelerator.is_available():
            super()._load_state_dict_to_vllm(state_dict)
            return
        worker = self.engine.inner_model_executor.driver_worker.worker
        worker.model_runner.reload_weights(weights_iterator=iter(state_dict.items()))


callbacks_map["step_clock"] = lambda args, trainer: StepClock(trainer, METHODS)
orms["vowels"] = Vowels
if "swift_grpo_ext" not in TrainerFactory.TRAINER_MAPPING["grpo"]:
    TrainerFactory.TRAINER_MAPPING["grpo"] = "timed_steps.PlainTrainer"
