"""Times each part of a step, for its log (promise V5); with any trainer of ms-swift that rolls out.

Methods of the trainer are timed from outside, so that all their overrides count. Time belongs to
the innermost part that runs. A step lasts from the end of one to the end of the next: the parts of
`PARTS` are the whole of it. Log, checkpoint and evaluation follow a step's end, and so belong to
the `rest` of the next.

On an accelerator a mark is an event of its stream: nothing waits, and work counts where it is done,
not where it was launched. The seconds between marks are read when a step is logged, whose loss was
waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from swift_grpo_ext.timing import PARTS, ROLLOUT_PARTS
from swift_grpo_ext.upstream.patches import wrapped

if TYPE_CHECKING:
    from swift.rlhf_trainers import GRPOTrainer

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
    "_assemble_teacher_api_logps": "logps",
    "_fetch_and_assemble_teacher_logprobs": "logps",
    "evaluation_loop": "rest",
}
"""Methods of the trainer, and what their time is but for that of methods within them."""


class Event(Protocol):
    """What the clock needs of an accelerator's event."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...

    def synchronize(self) -> Any: ...

    def elapsed_time(self, end: Any) -> float: ...


class HostEvent:
    """An event of the host's clock, which happens as it is recorded."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._at - self._at) * 1000


def event_type(device: torch.device) -> Callable[[], Event]:
    """Return what makes events that time the work of a device."""
    if device.type == "cpu":
        return HostEvent
    return partial(torch.get_device_module(device).Event, enable_timing=True)


@dataclass
class StepMarks:
    """The marks of a step, in their order; the last one ends it."""

    marks: list[tuple[Event, str]]
    """Each event, and the part that begins with it."""

    waits: list[float] = field(default_factory=list)
    """Seconds that the mean rank waited for the slowest, for each round."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of `PARTS` and `ROLLOUT_PARTS`, and of `wait` where ranks wait."""
        seconds = dict.fromkeys((*PARTS, *ROLLOUT_PARTS), 0.0)
        for (event, part), (next_event, _) in pairwise(self.marks):
            seconds[part] += event.elapsed_time(next_event) / 1000
        seconds["rollout"] += sum(seconds[part] for part in ROLLOUT_PARTS)
        return seconds | ({"wait": sum(self.waits)} if self.waits else {})


class StepClock(TrainerCallback):
    """Gives the log of each step `time/rollout` and the like: rank 0's seconds, and `time/wait`.

    `time/wait` is of `generate`: the mean over ranks of the seconds until the slowest was done.
    """

    def __init__(self, trainer: GRPOTrainer, new_event: Callable[[], Event] | None = None) -> None:
        """Take the trainer, which need not be ready yet.

        Args:
            new_event: makes an event; None makes those of the trainer's device.
        """
        self._trainer = trainer
        self._new_event = new_event
        self._timed = ExitStack()
        self._stack = ["rest"]  # of parts, each within the one before
        self._step = StepMarks([])
        self._ended: list[StepMarks] = []  # steps whose last event may not have happened
        self._is_evaluating = False

    # --- hooks of transformers ---

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: object
    ) -> None:
        trainer = self._trainer
        self._timed.close()  # what an earlier training left that failed
        for name in METHODS:
            if hasattr(trainer, name):
                self._wrap(trainer, name, METHODS[name])
        if trainer.deepspeed is not None:  # its optimizer steps within `training_step`
            self._wrap(trainer.deepspeed, "step", "optimizer")
        self._timed.enter_context(wrapped(trainer, "log", self._log_with_seconds))
        self._thread = threading.get_ident()
        self._new_event = self._new_event or event_type(trainer.accelerator.device)
        self._stack = ["rest"]
        self._step, self._ended = StepMarks([self._mark()]), []

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: object
    ) -> None:
        self._stack[0] = "rest"
        self._mark_change()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: object
    ) -> None:
        end = self._mark()
        self._step.marks.append(end)
        self._ended.append(self._step)
        self._step = StepMarks([end])
        self._take_ended(waits=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: object
    ) -> None:
        self._take_ended(waits=True)
        self._timed.close()

    # --- methods of the trainer ---

    def _wrap(self, owner: object, name: str, part: str) -> None:
        def timed(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # With `--async_generate` another thread generates, beside the step. An evaluation
            # calls methods that are timed, and counts as a whole.
            if self._is_evaluating or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._is_evaluating = name == "evaluation_loop"
            self._begin(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._is_evaluating = False
                self._end(part)

        self._timed.enter_context(wrapped(owner, name, timed))

    def _log_with_seconds(self, log: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._take_ended(waits=True)
        log(*args, **kwargs)

    def _begin(self, part: str) -> None:
        if part == "logps" and self._stack[-1] == "loss":
            part = "loss"  # the pass with gradients goes through the same method
        if part == "wake" and self._trainer.vllm_mode != "colocate":
            part = "rollout"  # a server does not sleep
        self._stack.append(part)
        self._mark_change()

    def _end(self, part: str) -> None:
        self._stack.pop()
        if part == "generate" and self._stack[-1] == "wake":
            self._stack[-1] = "sleep"  # `_fast_infer` has only that left to do
        is_last = part == "loss" and self._trainer.accelerator.sync_gradients
        if is_last and len(self._stack) == 1:  # gradients are clipped next
            self._stack[0] = "optimizer"
        self._mark_change()

    def note_wait(self, seconds: float) -> None:
        """Note by how much the slowest rank generated longer than the mean one."""
        if not self._is_evaluating:
            self._step.waits.append(seconds)

    # --- marks ---

    def _mark_change(self) -> None:
        if self._step.marks[-1][1] != self._stack[-1]:
            self._step.marks.append(self._mark())

    def _mark(self) -> tuple[Event, str]:
        assert self._new_event is not None
        event = self._new_event()
        event.record()
        return event, self._stack[-1]

    def _take_ended(self, *, waits: bool) -> None:
        """Hand the seconds of steps to the trainer's log, in their order: of all steps, or of those
        that the device has done."""
        while self._ended:
            last_event, _ = self._ended[0].marks[-1]
            if waits:
                last_event.synchronize()
            elif not last_event.query():
                break
            for part, value in self._ended.pop(0).seconds().items():
                self._trainer._metrics["train"][f"time/{part}"].append(value)
