"""Under DDP, chosen positions and chunks leave the reduced gradients what they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.logits.compare import assert_close
from tests.logits.two_ranks import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.logits.two_ranks", str(folder)]
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return torch.load(folder / "rank0.pt")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_two_ranks(results: dict[Any, Any], case: tuple[int, bool, bool]) -> None:
    ours, plain = results[case]
    nothing = torch.zeros(1)
    assert_close((nothing, ours), (nothing, plain))
