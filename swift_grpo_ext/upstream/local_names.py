"""Local variables of ms-swift's running calls, where nothing else has their values."""

from __future__ import annotations

import inspect
import sys

from transformers import HfArgumentParser


def being_parsed(kind: type) -> tuple[list[str], list[str]]:
    """Return what is being parsed into arguments of that class (the command line, a script's list,
    or Ray's) while ms-swift imports plugins, and ms-swift's own list of the unknown rest; nothing
    where Python makes the arguments."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is HfArgumentParser.parse_args_into_dataclasses.__code__:
            names = frame.f_locals
            if kind in names["self"].dataclass_types:
                argv = sys.argv[1:] if names["args"] is None else names["args"]
                return list(argv), names["remaining_args"]
        frame = frame.f_back
    return [], []
