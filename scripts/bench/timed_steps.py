"""A plugin for `step.py` that saves the times of ms-swift's steps, with or without our plugin.

`swift rlhf` loads it after `plugins/grpo_ext.py` or alone, with `--callbacks step_times
--reward_funcs vowels`. For each step it appends a JSON line to the file that the environment
variable `STEP_TIMES` names: the log's `time/*` from `StepClock`, and the peak memory.

On a CPU, ms-swift alone cannot load weights into vLLM, whose layers hold packed weights there. So
its trainer uses vLLM's `reload_weights`, and Qwen3.5's engine keeps its packed convolutions.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from swift.callbacks import callbacks_map
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory
from transformers import TrainerCallback

from swift_grpo_ext.timing.step_clock import StepClock
from swift_grpo_ext.upstream.patches import make


class StepTimes(TrainerCallback):
    """Saves times and memory of each step: the GPU allocator's peak during the step, or on a CPU
    the process's resident memory at its end."""

    def __init__(self, args: Any, trainer: Any) -> None:
        pass

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        times = {k.removeprefix("time/"): v for k, v in logs.items() if k.startswith("time/")}
        if not times:  # the summary at the end
            return
        peak = psutil.Process().memory_info().rss
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        since_start = time.time() - psutil.Process().create_time()
        line = {"times": times, "peak_gb": peak / 1e9, "since_start": since_start}
        with Path(os.environ["STEP_TIMES"]).open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")


class Vowels(ORM):
    """A reward that differs within a group."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [sum(c in "aeiou" for c in text.lower()) / max(len(text), 1) for text in completions]


class PlainTrainer(GRPOTrainer):
    """ms-swift's own trainer with our clock; it can load weights into vLLM on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(StepClock(self))

    def _load_state_dict_to_vllm(self, state_dict: dict[str, torch.Tensor]) -> None:
        if torch.accelerator.is_available():
            super()._load_state_dict_to_vllm(state_dict)
            return
        worker = self.engine.inner_model_executor.driver_worker.worker
        worker.model_runner.reload_weights(weights_iterator=iter(state_dict.items()))


callbacks_map["step_times"] = StepTimes
orms["vowels"] = Vowels
if "swift_grpo_ext" not in TrainerFactory.TRAINER_MAPPING["grpo"]:
    TrainerFactory.TRAINER_MAPPING["grpo"] = "timed_steps.PlainTrainer"
    if not torch.accelerator.is_available():
        from swift_grpo_ext.cpu.engines import keep_packed_convolutions

        make(keep_packed_convolutions)
