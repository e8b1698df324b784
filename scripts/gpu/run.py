"""Runs cases one after the other, in a process that a case may end.

After an error of CUDA nothing works in its process any more, and a kernel may hang: the case has
then failed, and the next one gets another process.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from scripts.gpu.plan import Case, Part

PASSED, FAILED, ERROR, NOT_TRIED, NO_TIME = "passed", "failed", "error", "not tried", "no time"

CASE_SECONDS = 90.0
"""What one case may take, the imports of a new process included."""


class Worker:
    """A process that runs cases; another one takes its place after an error."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def run(self, case: Case, seconds: float) -> dict[str, Any]:
        """Return the outcome of a case, which has so many seconds."""
        started = time.monotonic()
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs,))
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(case)
            if self._pipe.poll(seconds):
                outcome = self._pipe.recv()
            else:
                outcome = made(ERROR, f"It took more than {seconds:.0f} s.")
        except (EOFError, OSError):
            self._process.join()
            outcome = made(ERROR, f"It ended its process (exit code {self._process.exitcode}).")
        if outcome["status"] == ERROR:
            self.stop()
        return {"name": case.name, **outcome, "seconds": round(time.monotonic() - started, 2)}

    def stop(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.join(2)  # without a further case it ends by itself
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def serve(pipe: Connection) -> None:
    """Run the cases that the pipe gives, in the worker's process."""
    while True:
        try:
            case: Case = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(outcome_of(case))
        except Exception:
            pipe.send(made(ERROR, traceback.format_exc(limit=-3)))


def outcome_of(case: Case) -> dict[str, Any]:
    """Return what a case found, as JSON has it."""
    module, _, function = case.function.partition(":")
    found = getattr(import_module(module), function)(**case.arguments)
    if found.not_tried:
        return made(NOT_TRIED, found.not_tried)
    assert found.comparisons or found.rows, "it compared and measured nothing"
    comparisons = [{**asdict(c), "passed": c.passed} for c in found.comparisons]
    status = PASSED if all(c.passed for c in found.comparisons) else FAILED
    return {**made(status), "comparisons": comparisons, "rows": found.rows}


def made(status: str, reason: str = "") -> dict[str, Any]:
    """Return an outcome that has compared and measured nothing."""
    return {"status": status, "reason": reason, "comparisons": [], "rows": []}


def outcomes(parts: Sequence[Part], seconds: float) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Yield the outcome of each case; those that no longer fit are named."""
    worker, end = Worker(), time.monotonic() + seconds
    try:
        for part in parts:
            end_of_part = min(end, time.monotonic() + part.seconds)
            for case in part.cases:
                left = end_of_part - time.monotonic()
                if left <= 0:
                    yield part, {"name": case.name, **made(NO_TIME), "seconds": 0.0}
                else:
                    limit = min(CASE_SECONDS, end - time.monotonic())
                    yield part, worker.run(case, limit)
    finally:
        worker.stop()
