"""`--full_determinism true`: a run that is killed and resumed equals an uninterrupted one, bit for
bit."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from xxhash import xxh3_64_hexdigest

from swift_grpo_ext.checks.resume import is_whole
from swift_grpo_ext.record.query import open_record
from swift_grpo_ext.tools.diff import diff
from tests.rig.fixtures import LEARNED_STEPS
from tests.rig.processes import SWIFT, Finished, rollout_server, started
from tests.rig.rounds import (
    LEARNING,
    LORA,
    Samples,
    best_argv,
    client_argv,
    recorded,
    run_training,
    server_argv,
    train,
    training_command,
)

WAYS = {"full": (1, ()), "lora": (2, LORA)}
"""Ranks and arguments."""

SECONDS = 600


def train_and_kill(folder: Path, step: int, *data: Any, **kwargs: Any) -> None:
    """Kill all processes of a training once its checkpoint of this step is whole."""
    command, env = training_command(*data, **kwargs)
    checkpoint, deadline = folder / f"run/checkpoint-{step}", time.monotonic() + SECONDS
    with started([str(SWIFT), *command], folder / "log", env) as running:
        while not is_whole(checkpoint):
            assert running.process.poll() is None, running.output[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(running.process.pid, signal.SIGKILL)
        assert running.wait(SECONDS).returncode == -signal.SIGKILL


def digest(tensor: torch.Tensor) -> str:
    return xxh3_64_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def weights_of(checkpoint: Path) -> dict[str, str]:
    """Return digests of all weights of a checkpoint, and of the optimizer's state."""
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    state = torch.load(checkpoint / "optimizer.pt", map_location="cpu")["state"]
    optimizer_state = {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
    }
    assert tensors
    return {name: digest(tensor) for name, tensor in (tensors | optimizer_state).items()}


def tokens_of(samples: Samples) -> dict[str, Any]:
    return {name: (s["token_ids"], s["logprobs"], s["weights"]) for name, s in samples.items()}


def assert_same_killed_and_resumed(
    whole: Path, folder: Path, *data: Any, argv: Sequence[str], **counts: Any
) -> Finished:
    """Kill a run after two steps, and resume it for two more. Assert that it has the tokens,
    log-probabilities, losses, gradients, weights and optimizer's state of the whole run."""
    killed, resumed = folder / "killed", folder / "resumed"
    train_and_kill(killed, 2, *data, killed, *argv, **counts)
    halfway = killed / "run/checkpoint-2"
    again = ("--output_dir", str(killed / "run"), "--resume_from_checkpoint", str(halfway))
    finished = run_training(*data, resumed, *argv, *again, **counts)
    assert finished.returncode == 0, finished.cause

    expected = tokens_of(recorded(whole))
    before, after = tokens_of(recorded(killed)), tokens_of(recorded(resumed))
    assert {**before, **after} == expected
    assert before.items() <= expected.items()
    assert len(after) < len(expected)
    result = diff(open_record(whole / "run"), open_record(killed / "run"))
    assert result.is_equal
    assert result.logprob_gap == 0
    assert result.num_steps == LEARNED_STEPS
    assert result.checkpoint == f"checkpoint-{LEARNED_STEPS}"
    assert result.settings == {}
    sums = [weights_of(whole / f"run/checkpoint-{1 + step}") for step in range(LEARNED_STEPS)]
    for step, expected_sums in enumerate(sums):
        assert weights_of(killed / f"run/checkpoint-{1 + step}") == expected_sums, step
    assert len({tuple(s.values()) for s in sums}) == LEARNED_STEPS, "no weight moved"
    return finished


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("full", marks=pytest.mark.smoke),
        pytest.param("lora", marks=pytest.mark.extra),
    ],
)
def test_colocated(
    way: str, assets: Path, learning_rows: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """At its end the run loads its best weights."""
    ranks, argv = WAYS[way]
    whole = request.getfixturevalue(f"learned_{way}")
    argv = (*LEARNING, *argv, *best_argv(learning_rows, ranks))
    data = (assets, learning_rows)
    finished = assert_same_killed_and_resumed(
        whole, tmp_path, *data, argv=argv, ranks=ranks, steps=LEARNED_STEPS
    )
    # Of the checkpoint to resume from, and of the best one. PEFT loads adapters.
    num_loads = len(re.findall(r"The weights of \S+ are loaded", finished.output))
    assert num_loads == (2 if way == "full" else 0)


@pytest.mark.extra
def test_served_by_two_replicas(assets: Path, learning_rows: Path, tmp_path: Path) -> None:
    """Two ranks train. The engines take no step before they have all requests of a round."""
    server = server_argv(assets, "--vllm_data_parallel_size", "2")
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    counts = {"ranks": 2, "steps": LEARNED_STEPS}
    data = (assets, learning_rows)
    with rollout_server(*server, log=tmp_path / "server.log", env=env) as port:
        argv = (*LEARNING, *client_argv(port))
        train(*data, tmp_path / "whole", *argv, **counts)
        assert_same_killed_and_resumed(tmp_path / "whole", tmp_path, *data, argv=argv, **counts)
