"""Deterministic mode is on for the passes alone, and its environment slows nothing [R9].
`tests/stack/test_training.py` compares whole runs.

    python -m tests.unit.upstream.test_determinism FOLDER

compares the gradients of three ranks, since the sum of two numbers has only one order.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.backends import cudnn
from torch.nn.parallel import DistributedDataParallel
from transformers import trainer

from swift_grpo_ext.upstream import determinism
from swift_grpo_ext.upstream.determinism import (
    CUBLAS,
    deterministic,
    prepare_process,
    sum_gradients_one_by_one,
)
from tests.conftest import ROOT
from tests.rig.ranks import start_processes


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


WIDTH = 600  # a layer's weights are 1.4 MB, and a bucket of gradients has 1 MB


def gradients(rank: int, *, one_by_one: bool) -> list[torch.Tensor]:
    """Return the gradients of three backward passes over one batch, of accelerate's model."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    ddp = DistributedDataParallelKwargs(bucket_cap_mb=1)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    if one_by_one:
        sum_gradients_one_by_one(accelerator)
    model = accelerator.prepare_model(nn.Sequential(*layers))
    assert isinstance(model, DistributedDataParallel)
    torch.manual_seed(rank)
    batch = torch.randn(4, 32)
    found = []
    for _ in range(3):
        model.zero_grad()
        model(batch).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def run(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    first, second, third = gradients(rank, one_by_one=False)
    assert torch.equal(second, third)
    assert not torch.equal(first, second), "torch rounds alike by itself: the adaptation can go"
    ours = gradients(rank, one_by_one=True)
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[1], ours[2])
    torch.testing.assert_close(ours[0], first)


def test_three_ranks_round_gradients_alike_from_the_first_pass_on(tmp_path: Path) -> None:
    """The first pass of a resumed run is a later one of the interrupted run."""
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    start_processes(run, 3)
