"""Run every test on the GPU if torch finds one, else on the CPU.

`scripts/gpu.sh` runs `python -m pytest tests/gpu -n 1`, which needs no assets, engine or network.
After a CUDA error nothing works in a process; `-n 1` limits the damage to a worker.
"""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE
