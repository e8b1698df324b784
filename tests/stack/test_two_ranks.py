"""Two real ranks: chosen positions, chunks and shared prompts do not change values and
gradients."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rig.logits import two_ranks
from tests.rig.logits.compare import assert_close
from tests.rig.logits.two_ranks import Case

PASSES = 2 * two_ranks.STEPS


def results_of(folder: Path, *argv: str) -> list[dict[Any, Any]]:
    """Return what each rank of two processes wrote."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.rig.logits.two_ranks", str(folder), *argv],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return results_of(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def results_of_zero3(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: ZeRO-3 itself is not tested")
    return results_of(tmp_path_factory.mktemp("zero3"), "zero3")


@pytest.mark.parametrize("case", two_ranks.CASES, ids=str)
def test_ddp_and_fsdp(results: list[dict[Any, Any]], case: Case) -> None:
    assert_as_unsharded(results, case)


@pytest.mark.parametrize("case", two_ranks.ZERO3, ids=str)
def test_zero3(results_of_zero3: list[dict[Any, Any]], case: Case) -> None:
    assert_as_unsharded(results_of_zero3, case)


def assert_as_unsharded(results: list[dict[Any, Any]], case: Case) -> None:
    for rank in range(2):
        assert case in results[rank], f"not run: {results[rank]}"
        result = results[rank][case]
        assert "error" not in result, result["error"]
        assert_close(result["found"], result["expected"])
        if case.kind.startswith("DDP"):  # each rank by its own rows
            expected = [calls_of_the_head(case, count) for count in case.counts]
        else:
            expected = [calls_of_the_head(case, max(case.counts))] * 2
        assert result["calls"] == expected
        reason = ""
        if case.name == "refuses on rank 0":
            reason = "on another rank" if rank else "1 positions"
        assert [reason in text for text in result["warned"]] == ([True] if reason else [])


def calls_of_the_head(case: Case, count: int) -> int:
    """Return how often a rank calls it, over all passes."""
    # A pass ends with the last position.
    of_pass = max(1, -(-count // case.chunk_size)) + 1
    if case.name == "refuses on rank 0":
        return of_pass + PASSES
    # The backward computes chunks once more.
    recomputed = (of_pass - 1) * two_ranks.STEPS
    # A capped model needs one more pass to find its transform of logits.
    return of_pass * (PASSES + (case.name == "capped")) + recomputed


@pytest.mark.parametrize("case", two_ranks.SHARED_PROMPTS)
def test_shared_prompts(results: list[dict[Any, Any]], case: str) -> None:
    assert_prompts_are_shared(results, case)


@pytest.mark.parametrize("case", two_ranks.SHARED_PROMPTS_ZERO3)
def test_shared_prompts_zero3(results_of_zero3: list[dict[Any, Any]], case: str) -> None:
    assert_prompts_are_shared(results_of_zero3, case)


def assert_prompts_are_shared(results: list[dict[Any, Any]], case: str) -> None:
    """Only rank 0's batches can be packed in the first step, both ranks' in the second one, and
    rank 1's in the third."""
    for result in results:
        for found, expected in zip(result[case]["found"], result[case]["expected"], strict=True):
            assert_close(found, expected)
    of_rank_0, of_rank_1 = (result[case]["positions"] for result in results)
    apart, packed, whole = sorted(set(of_rank_0))
    if not case.startswith("DDP"):  # neither packs, nor makes a further pass, where one cannot
        both = [packed, whole, whole, packed, packed]
        assert of_rank_0 == [whole, whole, *both, apart, apart]
        assert of_rank_1 == [apart, apart, *both, whole, whole]
    elif case.endswith("alone"):
        assert of_rank_0 == [packed, whole, whole, packed, packed, apart]
        assert of_rank_1 == [apart, packed, whole, whole, packed, packed]
    else:  # rank 0 makes a pass more in each step
        assert of_rank_0 == [packed, whole, whole, *[packed] * 6, *[apart] * 3]
        assert of_rank_1 == [apart, apart, packed, whole, whole, *[packed] * 4]
