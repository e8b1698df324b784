"""Engines that are given the trainer's weights and sample with others end the run before it trains
on what they sampled: checksums of what they were given are right (M4). Engines that only have
shorter numbers than the trainer do not."""

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


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("stale", 1),  # the checkpoint's own, which are right once
        pytest.param("transposed", 0, marks=pytest.mark.extra),
        pytest.param("random", 0, marks=pytest.mark.extra),
        pytest.param("nan", 0, marks=pytest.mark.extra),
        pytest.param("no adapter", 1, marks=pytest.mark.extra),  # one that is new changes nothing
    ],
)
def test_weights_that_an_engine_does_not_use(
    kind: str, step: int, assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    apart = (*LORA, "--freeze_vit", "true", "--vllm_enable_lora", "true")
    argv = (*LEARNING, *(apart if kind == "no adapter" else ()))
    finished = run_training(
        assets, learning_rows, tmp_path, *argv, plugins=(PLUGIN,), env={"WRONG_WEIGHTS": kind}
    )
    assert finished.returncode != 0
    assert f"DisagreementError: Step {step}: log-probabilities of the rollout" in finished.output
    assert "rank 0 rows of image: " in finished.output
    log = tmp_path / "run/logging.jsonl"
    assert len(logged_steps(log.parent) if log.exists() else ()) == step, "it was trained on"


@pytest.mark.extra
def test_one_replica_of_two_is_named(assets: Path, learning_rows: Path, tmp_path: Path) -> None:
    argv = server_argv(assets, "--vllm_data_parallel_size", "2", plugins=(PLUGIN,))
    env = {"WRONG_WEIGHTS": "stale", "WRONG_REPLICA": "1"}
    with rollout_server(*argv, log=tmp_path / "server.log", env=env) as port:
        finished = run_training(
            assets, learning_rows, tmp_path / "run", *LEARNING, *client_argv(port)
        )
    assert finished.returncode != 0
    assert "DisagreementError: Step 1: " in finished.output
    assert f"server 0 (http://127.0.0.1:{port}) replica 1 rows of image: " in finished.output
    assert "Other engines agree: this one has other weights" in finished.output


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
    assert "lie further apart" not in finished.output
    seen = rf"a rollout gap of (\S+) nats \(rounding explains {limit}\), \S+ at most"
    found = re.search(seen, finished.output)
    assert found
    assert 1e-4 < float(found[1]) < 0.05
