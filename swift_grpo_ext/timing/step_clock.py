"""Measures each part of a step for its log, with any of ms-swift's rollout trainers: its seconds
(promise V5), and the memory at its end (`memory.py`).

The clock wraps methods of the trainer. Time belongs to the innermost running part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from swift_grpo_ext.timing import MEMORY_PARTS, PARTS, ROLLOUT_PARTS
from swift_grpo_ext.timing.memory import MemoryReader
from swift_grpo_ext.upstream.patches import wrapped

if TYPE_CHECKING:
    from swift.rlhf_trainers import GRPOTrainer

# The part for each method's time. Timed methods that it calls count on their own.
METHODS = {
    "training_step": "loss",
    "_prepare_inputs": "rest",
    "_rollout_samples": "rollout",
    "resample_encode_failed_inputs": "rollout",
    "_generate_completions": "rollout",
    "_fast_infer": "wake",
    "_move_model_to_vllm": "send",
    "_infer_single_or_multi_turn": "generate",
    "_wait_queue": "generate",
    "_score_completions": "rewards",
    "_prepare_batch_inputs": "batch",
    "_get_per_token_logps_and_entropies": "logps",
    "_rounded_logps": "logps",
    "_assemble_teacher_api_logps": "logps",
    "_fetch_and_assemble_teacher_logprobs": "logps",
    "evaluation_loop": "rest",
}


class StepClock(TrainerCallback):
    """Logs the seconds of each step's parts on rank 0 (`time/rollout` and others). `time/wait` is a
    part of `generate`: the mean over ranks of the seconds until the slowest rank was done."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self.memory = MemoryReader(trainer.accelerator.device)
        self._timed = ExitStack()
        self._seconds: dict[str, float] = {}  # of the step so far, by part
        self._is_evaluating = False
        self._stack = ["rest"]  # nested parts, the innermost last
        self._since = perf_counter()

    @property
    def running(self) -> tuple[str, float]:
        """The running part, and when it began or the last part within it ended."""
        return self._stack[-1], self._since

    # --- hooks of transformers ---

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        trainer = self._trainer
        self._timed.close()  # removes hooks of an earlier training that failed
        for name, part in METHODS.items():
            if hasattr(trainer, name):
                self._wrap(trainer, name, part)
        if trainer.deepspeed is not None:  # its optimizer steps within `training_step`
            self._wrap(trainer.deepspeed, "step", "optimizer")
        self._thread = threading.get_ident()
        self._stack, self._since = ["rest"], perf_counter()
        self._seconds = dict.fromkeys((*PARTS, *ROLLOUT_PARTS), 0.0)

    def on_optimizer_step(self, *args: object, **kwargs: object) -> None:
        self._count()
        self.memory.read(self._stack[0])
        self._stack[0] = "rest"

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self._count()
        self._seconds["rollout"] += sum(self._seconds[part] for part in ROLLOUT_PARTS)
        for part, value in self._seconds.items():
            self._trainer._metrics["train"][f"time/{part}"].append(value)
        # Log, checkpoint and evaluation follow: the next step's `rest` has their time.
        self._seconds = dict.fromkeys((*PARTS, *ROLLOUT_PARTS), 0.0)

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        self._timed.close()

    # --- methods of the trainer ---

    def _wrap(self, owner: object, name: str, part: str) -> None:
        def timed(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # With `--async_generate` another thread generates. An evaluation counts as a whole.
            if self._is_evaluating or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            stack, actual_part = self._stack, part
            if part == "logps" and stack[-1] == "loss":
                actual_part = "loss"  # the pass with gradients calls the same method
            if part == "wake" and self._trainer.vllm_mode != "colocate":
                actual_part = "rollout"  # a server does not sleep
            self._count()
            if part == "generate":
                self.memory.read(stack[-1])  # the engine is awake now
            stack.append(actual_part)
            self._is_evaluating = name == "evaluation_loop"
            try:
                return method(*args, **kwargs)
            finally:
                self._is_evaluating = False
                self._count()
                self.memory.read(stack.pop())
                if part == "generate" and stack[-1] == "wake":
                    stack[-1] = "sleep"  # the rest of `_fast_infer` puts the engine to sleep
                is_last = part == "loss" and self._trainer.accelerator.sync_gradients
                if is_last and len(stack) == 1:  # gradients are clipped next
                    stack[0] = "optimizer"

        self._timed.enter_context(wrapped(owner, name, timed))

    def _count(self) -> None:
        """Add the seconds since the last call to the running part."""
        # The host's clock, without waiting for a device: an accelerator's seconds count in the part
        # in which the host waits for it.
        now = perf_counter()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    def record_wait(self, seconds: float) -> None:
        """Record how many seconds longer than the mean rank the slowest rank generated."""
        if not self._is_evaluating:
            self._seconds["wait"] = self._seconds.get("wait", 0.0) + seconds

    def log_memory(self, reports: Sequence[Mapping[str, float]]) -> None:
        """Log the memory of the fullest device after each part (`memory/loss` and others, GiB).
        `reports` holds what `memory.take` returned on each rank."""
        metrics = self._trainer._metrics["train"]
        for part in MEMORY_PARTS:
            if values := [report[part] for report in reports if part in report]:
                # One value: ms-swift logs the mean of several steps' values.
                metrics[f"memory/{part}"] = [max(values + metrics[f"memory/{part}"])]
