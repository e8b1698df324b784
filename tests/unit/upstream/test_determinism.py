"""Deterministic mode is on for the passes alone, and its environment slows nothing [R9].
`tests/stack/test_training.py` compares whole runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.backends import cudnn
from transformers import trainer

from swift_grpo_ext.upstream import determinism
from swift_grpo_ext.upstream.determinism import CUBLAS, deterministic, prepare_process
from tests.conftest import ROOT


def has_no_fixed_order() -> None:
    """Run an operation that torch refuses in deterministic mode."""
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_the_passes_are_deterministic_and_an_engine_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that transformers' trainer calls switches the mode on. The environment slows
    nothing, and the user's own value stays."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with deterministic(False):  # afterwards, the process is as it was
        prepare_process()
        trainer.enable_full_determinism(42)
        numbers = torch.rand(3)
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            has_no_fixed_order()
        assert cudnn.deterministic
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with deterministic(False):
            has_no_fixed_order()
            assert not cudnn.deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert cudnn.deterministic
        trainer.enable_full_determinism(42)
        assert torch.equal(torch.rand(3), numbers)
    assert environment == {CUBLAS: ":4096:8", **determinism.ENVIRONMENT}
    environment[CUBLAS] = ":16:8"
    prepare_process()
    assert environment[CUBLAS] == ":16:8"


def test_where_arrival_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in vLLM's batch-invariant mode, nor in an engine of one's own process that waits for all
    requests, nor without an accelerator."""
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for environment, follows in (
        ({}, [True, True]),
        ({"VLLM_BATCH_INVARIANT": "1"}, [False, False]),
        ({"VLLM_BATCH_INVARIANT": "0"}, [True, True]),
        (in_process, [True, False]),
    ):
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(determinism, "has_accelerator", lambda: True)
        found = [determinism.batches_follow_arrival(is_async=each) for each in (True, False)]
        assert found == follows
        monkeypatch.setattr(determinism, "has_accelerator", lambda: False)
        assert not determinism.batches_follow_arrival(is_async=True)


def test_three_ranks_round_gradients_alike_from_the_first_pass_on(tmp_path: Path) -> None:
    """The first pass of a resumed run is a later one of the interrupted run."""
    command = [sys.executable, "-m", "tests.rig.upstream.three_ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
