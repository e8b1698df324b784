"""What only upstream's local variables say, of calls that are under way. `pins.py` holds their
names against the source (`binds`)."""

from __future__ import annotations

import inspect
import sys

from transformers import HfArgumentParser


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
