"""Logits of other positions are never computed, and chunks bound those that are (SPEC L2, L4)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.logits.memory import CHUNK, NAMES, NEW, PROMPT, VOCABULARY

pytestmark = pytest.mark.stack

ROOT = Path(__file__).resolve().parents[2]
POSITION = 4 * VOCABULARY
"""Bytes of the logits of one position."""


@pytest.fixture(scope="module")
def peaks() -> dict[str, dict[str, int]]:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.logits.memory"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(params=NAMES)
def peak(request: pytest.FixtureRequest, peaks: dict[str, dict[str, int]]) -> dict[str, int]:
    if request.param not in peaks:
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    return peaks[request.param]


def test_other_positions_take_no_memory(peak: dict[str, int]) -> None:
    assert peak["chosen"] <= (NEW / (PROMPT + NEW) + 0.05) * peak["all"]
    # With that arithmetic on the last positions, those of the others at least are saved.
    assert peak["all"] - peak["last"] > 0.9 * POSITION * PROMPT


def test_chunks_bound_memory(peak: dict[str, int]) -> None:
    assert CHUNK / NEW < 0.1
    assert peak["chunked"] <= 0.25 * peak["last"]
