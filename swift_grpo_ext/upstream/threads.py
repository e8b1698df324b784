"""Runs work that may never end in a thread that does not block the process's exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread."""
    # A `ThreadPoolExecutor` would block the process's exit until `work` returns.
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return outcome
