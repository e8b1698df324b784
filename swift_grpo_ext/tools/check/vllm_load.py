"""Whether vLLM loads, found in a process of its own while this one loads ms-swift: each takes
seconds of a core."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

SCRIPT = "from vllm.platforms import current_platform as p; print(p.device_type)"
LIMIT_SECONDS = 120.0


@cache
def start() -> subprocess.Popen[str]:
    """Begin, once."""
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], text=True, env=env, stdout=pipe, stderr=pipe
    )


def device_type() -> str:
    """What vLLM runs on: `cpu`, `cuda`, ...; empty where it knows no device.

    Raises:
        ImportError: it cannot be loaded; says why.
    """
    process = start()
    try:
        found, said = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired as e:
        process.kill()
        raise ImportError(f"not loaded after {LIMIT_SECONDS:.0f} s") from e
    if process.returncode:
        raise ImportError((said.strip().splitlines() or [f"exit {process.returncode}"])[-1])
    return (found.strip().splitlines() or [""])[-1]
