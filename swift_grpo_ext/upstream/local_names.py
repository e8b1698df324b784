"""Local variables of upstream's calls that are under way, where nothing else has their values."""

from __future__ import annotations

import inspect
import sys

from transformers import HfArgumentParser


def being_parsed(kind: type) -> tuple[list[str], list[str]]:
    """Return what is being parsed into arguments of that class, and ms-swift's own list of what it
    did not know; nothing where Python makes the arguments.

    ms-swift imports plugins meanwhile. Only the call knows what it was given: the command line, a
    script's list, or Ray's.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is HfArgumentParser.parse_args_into_dataclasses.__code__:
            names = frame.f_locals
            if kind in names["self"].dataclass_types:  # and not another parser's further up
                argv = sys.argv[1:] if names["args"] is None else names["args"]
                return list(argv), names["remaining_args"]
        frame = frame.f_back
    return [], []
