"""A clock of a training step's phases, for ms-swift's trainer, ours and TRL's (`step.py`).

One JSON line for each step goes to the file that the environment variable `STEP_TIMES` names.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerCallback

PHASES = ("rollout", "scoring", "batch", "log-probabilities", "loss", "weights", "rest")
"""Of a step: `loss` is forward and backward; `weights` go to the engine; the `rest` is the
optimizer, the rows and the logs."""


class PhaseClock:
    """Seconds of each phase, without those of a phase inside it.

    Args:
        now: the clock.
        phases: their names; the last is what lies outside of all others.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, phases: Sequence[str] = PHASES
    ) -> None:
        self._now, self._phases = now, phases
        self._stack = [phases[-1]]
        self._since = now()
        self._seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, methods: Mapping[str, str]) -> None:
        """Let an object's methods be phases."""
        for name, phase in methods.items():
            setattr(owner, name, self._timed(getattr(owner, name), phase))

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return method(*args, **kwargs)

        return timed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "log-probabilities" and self._stack[-1] == "loss":
            name = "loss"
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        now = self._now()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self._charge()
        seconds = {phase: self._seconds[phase] for phase in self._phases}
        self._seconds.clear()
        return seconds


class StepClock(TrainerCallback):
    """Writes down each step: from the end of one to the end of the next."""

    def __init__(self, trainer: Any, methods: Mapping[str, str]) -> None:
        self._trainer, self._methods = trainer, methods
        self.clock = PhaseClock()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.wrap(self._trainer, self._methods)
        self.clock.take()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        line = {
            "step": state.global_step,
            "since_start": time.time() - psutil.Process().create_time(),
            "phases": self.clock.take(),
            "peak_gb": psutil.Process().memory_info().rss / 1e9,
        }
        with Path(os.environ["STEP_TIMES"]).open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")


def vowels(text: str) -> float:
    """A reward that differs within a group."""
    return sum(letter in "aeiou" for letter in text.lower()) / max(len(text), 1)
