"""Two real ranks: chosen positions, chunks and shared prompts do not change values and gradients,
and no rank waits for another [L1, L6, R2]."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.rig.logits import two_ranks
from tests.rig.logits.batch import assert_close
from tests.rig.logits.two_ranks import Case

Results = Callable[[Case], list[dict[str, Any]]]
"""Returns each rank's results of a case, after a comparison of values and gradients."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.rig.logits.two_ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    of_ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]

    def results_of_case(case: Case) -> list[dict[str, Any]]:
        for of_rank in of_ranks:
            assert str(case) in of_rank, of_rank["error"]
            result = of_rank[str(case)]
            for step, expected in zip(result["found"], result["expected"], strict=True):
                assert_close(step, expected)
        return [of_rank[str(case)] for of_rank in of_ranks]

    return results_of_case


@pytest.mark.parametrize("case", two_ranks.CASES, ids=str)
def test_chosen_positions(results: Results, case: Case) -> None:
    """Logits in chunks are given up by both ranks, or by none."""
    for rank, result in enumerate(results(case)):
        reason = ""
        if case.name == "refuses on rank 0":
            reason = "on another rank" if rank else "RuntimeError"
        assert [reason in text for text in result["warned"]] == ([True] if reason else [])


@pytest.mark.parametrize("case", two_ranks.SHARED, ids=str)
def test_shared_prompts(results: Results, case: Case) -> None:
    """Only rank 0's batches can be packed in the first step, both ranks' in the second one, and
    rank 1's in the third."""
    of_rank_0, of_rank_1 = (result["positions"] for result in results(case))
    apart, packed, whole = sorted(set(of_rank_0))
    if case.kind != "DDP":  # neither packs, nor makes a further pass, where one cannot
        both = [packed, whole, whole, packed, packed]
        assert of_rank_0 == [whole, whole, *both, apart, apart]
        assert of_rank_1 == [apart, apart, *both, whole, whole]
    elif case.num_before == (0, 0):
        assert of_rank_0 == [packed, whole, whole, packed, packed, apart]
        assert of_rank_1 == [apart, packed, whole, whole, packed, packed]
    else:  # rank 0 makes a pass more in each step
        assert of_rank_0 == [packed, whole, whole, *[packed] * 6, *[apart] * 3]
        assert of_rank_1 == [apart, apart, packed, whole, whole, *[packed] * 4]
