"""Work that may never end, in a thread that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a thread that ends with the process, and return what will hold its result."""
    # A `ThreadPoolExecutor` would wait for the thread at the process's end.
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return outcome
