"""Engines that are given the trainer's weights and sample with others end the run before it trains
on what they sampled (M4): the watch names what an engine made of an update, and the gap what it
samples without. Engines that only have shorter numbers than the trainer do not."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.stack.processes import rollout_server
from tests.stack.rounds import LORA, client_argv, logged_steps, run_training, server_argv

pytestmark = pytest.mark.stack

PLUGIN = "tests/stack/wrong_weights.py"
LEARNING = ("--learning_rate", "2e-3", "--temperature", "1.0")


SPOILED = "layers.1.self_attn.o_proj"
APART = (*LORA, "--freeze_vit", "true", "--vllm_enable_lora", "true")


@pytest.mark.parametrize(
    ("kind", "step", "named"),
    [
        ("stale", 1, "(stale)"),  # the checkpoint's own, which are right once
        pytest.param("transposed", 0, f"{SPOILED} moved by 1", marks=pytest.mark.extra),
        pytest.param("random", 0, f"{SPOILED} moved by 1", marks=pytest.mark.extra),
        pytest.param("nan", 0, f"{SPOILED} holds NaN", marks=pytest.mark.extra),
    ],
)
def test_what_an_engine_makes_of_weights(
    kind: str, step: int, named: str, assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """The update that brings them fails, and names engine and tensor."""
    finished = run_training(
        assets, learning_rows, tmp_path, *LEARNING, plugins=(PLUGIN,), env={"WRONG_WEIGHTS": kind}
    )
    assert finished.returncode != 0
    assert "WeightUpdateError: The colocated engine of rank 0: the weight" in finished.output
    assert named in finished.output
    assert steps_of(tmp_path / "run") == step


def test_an_adapter_that_an_engine_does_not_use(
    assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """One of two replicas: the gap names it at the first step at which an adapter does anything."""
    argv = server_argv(assets, *APART[-2:], "--vllm_data_parallel_size", "2", plugins=(PLUGIN,))
    env = {"WRONG_WEIGHTS": "no adapter", "WRONG_REPLICA": "1"}
    with rollout_server(*argv, log=tmp_path / "server.log", env=env) as port:
        client = (*LEARNING, *APART[:-2], *client_argv(port))
        finished = run_training(assets, learning_rows, tmp_path, *client)
    assert finished.returncode != 0
    assert "DisagreementError: Step 1: log-probabilities of the rollout" in finished.output
    assert f"server 0 (http://127.0.0.1:{port}) replica 1 rows of image: " in finished.output
    assert "Other engines agree: this one has other weights" in finished.output
    assert steps_of(tmp_path / "run") == 1


def steps_of(run: Path) -> int:
    """How many steps were trained."""
    return len(logged_steps(run) if (run / "logging.jsonl").exists() else ())


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [
        pytest.param("bfloat16", "0.12", marks=pytest.mark.extra),
        pytest.param(
            "fp8",
            "2",
            marks=pytest.mark.skipif(
                not torch.cpu._is_avx512_supported(), reason="vLLM's cache of fp8 needs AVX-512"
            ),
        ),
    ],
)
def test_the_less_precise_side_sets_the_limit(
    numbers: str, limit: str, assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """A trainer of float32 with a server of bfloat16, and with a quantized cache beside it."""
    with ExitStack() as servers:
        kwargs = json.dumps({"kv_cache_memory_bytes": 2**27, "kv_cache_dtype": numbers})
        argv = ["--vllm_engine_kwargs", kwargs]
        if numbers == "bfloat16":
            command = [a.replace("float32", numbers) for a in server_argv(assets)]
            argv = client_argv(
                servers.enter_context(rollout_server(*command, log=tmp_path / "server.log"))
            )
        finished = run_training(assets, learning_rows, tmp_path, *LEARNING, *argv, steps=2)
    assert finished.returncode == 0, finished.cause
    assert "differ by more than" not in finished.output
    seen = rf"a rollout gap of (\S+) nats \(rounding explains {limit}\), \S+ at most"
    found = re.search(seen, finished.output)
    assert found
    assert 1e-4 < float(found[1]) < 0.05
