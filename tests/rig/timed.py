"""A trainer whose methods call each other as ms-swift's do, for tests of the step's clock."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from swift_grpo_ext.timing.step_clock import StepClock

WORK: dict[str, tuple[Any, ...]] = {
    "training_step": ("_prepare_inputs", "_get_per_token_logps_and_entropies", 64),
    "_prepare_inputs": (0.5, "_rollout_samples", "_score_completions", "_prepare_batch_inputs"),
    "_rollout_samples": (1, "_generate_completions"),
    "_generate_completions": (1, "_fast_infer"),
    "_fast_infer": (2, "_move_model_to_vllm", 2, "_infer_single_or_multi_turn", 16),
    "_move_model_to_vllm": (8,),
    "_infer_single_or_multi_turn": (100,),
    "_score_completions": (1000,),
    "_prepare_batch_inputs": (2000, "_get_per_token_logps_and_entropies"),
    "_get_per_token_logps_and_entropies": (3000,),
    "evaluation_loop": (10000, "_rollout_samples"),
}
"""What each method of the trainer does: seconds of its own, methods that it calls, functions."""


class Trainer:
    """Calls its methods as ms-swift's trainer does. Its work moves the clock."""

    deepspeed: Any = None
    clock: StepClock

    def __init__(self, vllm_mode: str = "colocate", device: str = "cpu", **work: Any) -> None:
        self.now, self.vllm_mode = 0.0, vllm_mode
        self._metrics: Any = {"train": defaultdict(list)}
        self.accelerator = SimpleNamespace(sync_gradients=True, device=torch.device(device))
        for name, parts in (WORK | work).items():
            setattr(self, name, partial(self._work, parts))

    def _work(self, parts: tuple[Any, ...]) -> str:
        for part in parts:
            if isinstance(part, str):
                getattr(self, part)()
            elif callable(part):
                part(self)
            else:
                self.now += part
        return "samples"

    def begin(self) -> None:
        """Begin a training."""
        self.clock = StepClock(self)  # type: ignore[arg-type]
        self.clock.on_train_begin()

    def step(self, *batches: bool) -> None:
        """Make a step of batches; each value says whether that batch synchronizes gradients."""
        for is_last in batches or (True,):
            self.accelerator.sync_gradients = is_last
            self.training_step()  # type: ignore[attr-defined]
            self.now += 0 if is_last else 5  # between two batches there is no optimizer
        self.now += 256  # clipping, and the optimizer
        self.clock.on_optimizer_step()
        self.now += 512  # other callbacks
        self.clock.on_step_end()

    def logged(self) -> dict[str, float]:
        """Return the means that ms-swift logs, and forget them as it does."""
        metrics = self._metrics["train"]
        seconds = {name.removeprefix("time/"): sum(of) / len(of) for name, of in metrics.items()}
        metrics.clear()
        return seconds
