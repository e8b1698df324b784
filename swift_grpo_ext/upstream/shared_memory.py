"""Colocated engines with tensor parallelism on CPU, in several runs on one machine.

Symptom: `create shm in SHMManager failed. errno: 17`, where two runs start at the same moment.
Upstream: vLLM 0.32, v1/worker/cpu_worker.py: the name of the memory that ranks share is made of
what follows the last colon of the rendezvous' address. That is a port, but `//` for `env://`, the
address of every colocated engine.
Here: the port of the rendezvous becomes part of the name.
Can go when vLLM's name differs from run to run.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed


@cache
def install() -> None:
    """Let each run have names of its own. Call before an engine is made."""
    make_name = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"{make_name(communicator)}-{os.environ.get('MASTER_PORT', '')}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
