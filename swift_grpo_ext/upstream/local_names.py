"""Reads local variables of running ms-swift frames, where no API has their values."""

from __future__ import annotations

import inspect
import sys

from transformers import HfArgumentParser


def being_parsed(kind: type) -> tuple[list[str], list[str]]:
    """Return the arguments that are being parsed into `kind` (from the command line, a script or
    Ray) while ms-swift imports plugins, and ms-swift's own list of unknown arguments. Both are
    empty if Python code creates `kind`."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is HfArgumentParser.parse_args_into_dataclasses.__code__:
            names = frame.f_locals
            if kind in names["self"].dataclass_types:
                argv = sys.argv[1:] if names["args"] is None else names["args"]
                return list(argv), names["remaining_args"]
        frame = frame.f_back
    return [], []
