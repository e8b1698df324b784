"""An engine that samples with other weights than the trainer's ends the run before the trainer
learns from its samples (M4). The watch finds an update that an engine did not take, the gap an
adapter that it does not use. Lower precision is no fault. `test_watch.py` has a table of faults.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.rig.processes import rollout_server
from tests.rig.rounds import LORA, client_argv, logged_steps, run_training, server_argv

PLUGIN = "tests/rig/wrong_weights.py"
LEARNING = ("--learning_rate", "2e-3", "--temperature", "1.0")
APART = (*LORA, "--freeze_vit", "true", "--vllm_enable_lora", "true")


def test_an_engine_that_keeps_its_first_weights(
    assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """The second update fails: the weights of the first one are the checkpoint's own."""
    finished = run_training(
        *(assets, learning_rows, tmp_path, *LEARNING),
        plugins=(PLUGIN,),
        env={"WRONG_WEIGHTS": "stale"},
    )
    assert finished.returncode != 0
    assert "WeightUpdateError: The colocated engine of rank 0: the weight" in finished.output
    assert "(stale)" in finished.output
    assert steps_of(tmp_path / "run") == 1


def test_an_adapter_that_an_engine_does_not_use(
    assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """The gap names the one of two replicas that ignores its adapter, at the first step at which
    adapters differ from 0."""
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
    """Return the number of trained steps."""
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
    """A float32 trainer with a bfloat16 server, or with a colocated engine whose cache is fp8."""
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
