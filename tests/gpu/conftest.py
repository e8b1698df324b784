"""Every test runs on the GPU where torch finds one, else on the CPU.

`python -m pytest tests/gpu -n 1` is what `scripts/gpu.sh` runs: it needs no assets, engine or
network, and an error of CUDA, after which nothing works in a process, ends one worker alone.
"""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE
