"""Where file descriptors 1 and 2 lead while others print: ms-swift, vLLM and their processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def redirected(*streams: int, to: int) -> Iterator[None]:
    """Lead file descriptors to another within the block, for child processes too."""
    sys.stdout.flush()
    kept = [os.dup(stream) for stream in streams]
    for stream in streams:
        os.dup2(to, stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        for stream, copy in zip(streams, kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
