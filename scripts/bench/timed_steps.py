"""A plugin for `step.py`: times the steps of ms-swift's trainer, with this plugin or without.

Loaded after `plugins/grpo_ext.py`, or alone; with `--callbacks step_clock --reward_funcs vowels`.
One JSON line for each step goes to the file that the environment variable `STEP_TIMES` names.
Alone and without an accelerator, ms-swift cannot give weights to vLLM, whose CPU layers hold packed
ones: its trainer gets vLLM's own `reload_weights` for it, and the engine of Qwen3.5 leaves packed
convolutions as they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import torch
from swift.callbacks import callbacks_map
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory
from transformers import TrainerCallback

from swift_grpo_ext.upstream.vllm_repairs import keep_packed_convolutions

PHASES = ("rollout", "scoring", "batch", "log-probabilities", "loss", "weights", "rest")
"""Of a step: `loss` is forward and backward; `weights` go to the engine; the `rest` is the
optimizer, the rows and the logs."""

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


class StepClock(TrainerCallback):
    """Writes down each step, from the end of one to the end of the next: the seconds of each phase,
    without those of a phase inside it. The last of `PHASES` is what lies outside of all others."""

    def __init__(self, args: Any, trainer: Any) -> None:
        self._trainer = trainer
        self._stack = [PHASES[-1]]
        self._since = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for name, phase in METHODS.items():
            setattr(self._trainer, name, self._timed(getattr(self._trainer, name), phase))
        self._since = time.perf_counter()

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            is_of_loss = phase == "log-probabilities" and self._stack[-1] == "loss"
            self._charge()
            self._stack.append("loss" if is_of_loss else phase)
            try:
                return method(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()

        return timed

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._charge()
        line = {
            "since_start": time.time() - psutil.Process().create_time(),
            "phases": self._seconds,
            "peak_gb": psutil.Process().memory_info().rss / 1e9,
        }
        with Path(os.environ["STEP_TIMES"]).open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        self._seconds = dict.fromkeys(PHASES, 0.0)


class Vowels(ORM):
    """This reward differs within a group."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [sum(c in "aeiou" for c in text.lower()) / max(len(text), 1) for text in completions]


class PlainTrainer(GRPOTrainer):
    """It is ms-swift's own trainer, and can give weights to vLLM without an accelerator."""

    def _load_state_dict_to_vllm(self, state_dict: dict[str, torch.Tensor]) -> None:
        if torch.accelerator.is_available():
            super()._load_state_dict_to_vllm(state_dict)
            return
        worker = self.engine.inner_model_executor.driver_worker.worker
        worker.model_runner.reload_weights(weights_iterator=iter(state_dict.items()))


callbacks_map["step_clock"] = StepClock
orms["vowels"] = Vowels
if "swift_grpo_ext" not in TrainerFactory.TRAINER_MAPPING["grpo"]:
    TrainerFactory.TRAINER_MAPPING["grpo"] = "timed_steps.PlainTrainer"
    if not torch.accelerator.is_available():
        keep_packed_convolutions()
