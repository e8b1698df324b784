"""Ctrl-C ends everything that was started: trainer ranks, engine workers, servers.

Here the real commands start, with torchrun; most other tests fork theirs from the zygote.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stack.processes import PLUGIN, SWIFT, free_port, started

pytestmark = pytest.mark.stack

SECONDS_TO_END = 120


def trainer(assets: Path, folder: Path) -> list[str]:
    return [
        *(str(SWIFT), "rlhf", "examples/digits/grpo.yaml", "--max_steps", "1000"),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(assets / "digits/train.jsonl")),
        *("--per_device_train_batch_size", "4", "--num_generations", "4"),
        *("--output_dir", str(folder / "run"), "--add_version", "false"),
    ]


def test_training_is_interrupted(assets: Path, tmp_path: Path) -> None:
    env = {"NPROC_PER_NODE": "2"}
    with started(trainer(assets, tmp_path), tmp_path / "log", env, real=True) as running:
        running.wait_for("'global_step/max_steps': '1/1000'", seconds=900)
        running.interrupt()
        assert running.survivors(SECONDS_TO_END) == []
        assert running.process.wait(5) != 0


def test_a_server_is_interrupted(assets: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [
        *(str(SWIFT), "rollout", "--port", str(port), "--host", "127.0.0.1"),
        *("--model", str(assets / "tiny_vlm"), "--external_plugins", PLUGIN),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--torch_dtype", "float32"),
        *("--vllm_max_model_len", "512", "--vllm_enforce_eager", "true"),
        *("--vllm_data_parallel_size", "2"),
    ]
    with started(command, tmp_path / "log", real=True) as running:
        running.wait_for("Uvicorn running on", seconds=900)
        running.interrupt()
        assert running.survivors(SECONDS_TO_END) == []
