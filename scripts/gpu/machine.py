"""Say what the machine is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from scripts.bench.common import environment
from scripts.gpu.found import Found
from scripts.gpu.plan import FLASH

OPTIONAL = (
    "peft", "accelerate", "triton", *FLASH.values(), "flash-linear-attention", "causal-conv1d",
)  # fmt: skip


def run(device: str) -> Found:
    """Return the device, its memory, and the releases that decide which kernels run."""
    made = environment()
    row: dict[str, Any] = {
        "device": made["accelerator"] or f"{made['cores']} cores of {made['cpu']}"
    }
    row["memory, GiB"] = made["memory_gib"]
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row["memory, GiB"] = round(properties.total_memory / 2**30, 1)
        row |= {"capability": f"{properties.major}.{properties.minor}", "CUDA": torch.version.cuda}
    row |= {"python": made["python"], **made["versions"]}
    for package in OPTIONAL:
        try:
            row[package] = version(package)
        except PackageNotFoundError:
            row[package] = None
    return Found(rows=[{**row, "date": made["date"]}])
