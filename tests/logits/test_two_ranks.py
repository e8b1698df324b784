"""Two real ranks: chosen positions, chunks and shared prompts leave values and gradients what they
were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.logits import two_ranks
from tests.logits.compare import assert_close
from tests.logits.two_ranks import Case

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank of two processes wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.logits.two_ranks", str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", two_ranks.CASES, ids=str)
def test_training_is_as_unsharded(results: list[dict[Any, Any]], case: Case) -> None:
    for rank in range(2):
        assert case in results[rank], f"not run: {results[rank]}"
        result = results[rank][case]
        assert "error" not in result, result["error"]
        assert_close(result["found"], result["expected"])
        # What is sharded is called equally often by all ranks; a replica, by its own rows.
        assert case.kind.startswith("DDP") or len(set(result["calls"])) == 1
        falls_back = case.name == "refuses odd numbers"  # as those of rank 0 are
        reason = "on another rank" if rank else "7 positions"
        assert [reason in text for text in result["warned"]] == [True] * falls_back


@pytest.mark.parametrize("case", two_ranks.SHARED_PROMPTS)
def test_shared_prompts(results: list[dict[Any, Any]], case: str) -> None:
    """Only rank 0's batches can be packed in the first step, both ranks' in the second one."""
    for result in results:
        for found, expected in zip(result[case]["found"], result[case]["expected"], strict=True):
            assert_close(found, expected)
    of_rank_0, of_rank_1 = (result[case]["positions"] for result in results)
    packed, apart, whole = min(of_rank_0), min(of_rank_1), max(of_rank_0)
    if case == "FSDP2":  # neither makes a further pass before both can
        assert of_rank_0 == [whole, whole, packed, whole, packed, packed]
        assert of_rank_1 == [apart, apart, packed, whole, packed, packed]
    else:
        of_step = 3 if case.endswith("rank 0") else 1
        assert of_rank_0 == [packed, whole, *[packed] * 2 * of_step]
        last = [packed, whole] if case.endswith("alone") else [packed, whole, packed]
        assert of_rank_1 == [apart] * (len(of_rank_1) - len(last) - 1) + [*last, packed]
