"""What only upstream's local variables say, of calls that are under way. `pins.py` holds their
names against the source (`binds`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Coroutine
from typing import Any

from transformers import HfArgumentParser

from swift_grpo_ext.upstream.contract import TRIED, UnsupportedUpstreamError


def request_of(task: Coroutine[Any, Any, Any]) -> Any:
    """Return the request, an object or a dictionary, that a coroutine of ms-swift will serve. It
    must not have begun.

    `MultiTurnScheduler.async_infer` hands them to the engine without their requests (ms-swift 4.6,
    rollout/multi_turn.py, `_infer_async_single`); without a scheduler, `infer_async` is one.

    Raises:
        UnsupportedUpstreamError: it does not say; without it seeds and stops would be lost.
    """
    names = inspect.getcoroutinelocals(task)
    if "infer_request" not in names:
        task.close()
        own, found = getattr(task, "__qualname__", task), ", ".join(names) or "(none)"
        raise UnsupportedUpstreamError(
            f"{own} has the local names {found}; expected "
            "`infer_request`, since a request's seed and stops are found by it. Leave out a "
            "--multi_turn_scheduler whose `async_infer` makes coroutines of its own, or name that "
            f"parameter so; ms-swift {', '.join(TRIED['ms-swift'])} do."
        )
    return names["infer_request"]


def being_parsed(kind: type) -> tuple[list[str], list[str]]:
    """Return what is being parsed into arguments of that class, and ms-swift's own list of what it
    did not know; nothing where Python makes the arguments.

    Plugins are imported in the middle of it: only the call that is under way knows what it was
    given, the command line, a script's list, or Ray's.
    """
    # Python keeps the locals of each call that is under way: go up to the parser's.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is HfArgumentParser.parse_args_into_dataclasses.__code__:
            names = frame.f_locals
            if kind in names["self"].dataclass_types:  # and not another parser's further up
                argv = sys.argv[1:] if names["args"] is None else names["args"]
                return list(argv), names["remaining_args"]
        frame = frame.f_back
    return [], []
