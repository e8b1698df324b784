"""Every way of training that CPU runs support, with the real `swift`, vLLM and Qwen2.5-VL.

Each trains some steps and proves that the engine sampled with the weights that training had made.
`test_servers.py` does so for servers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_grpo_ext.record.reader import read_samples
from tests.stack import policy
from tests.stack.conftest import LEARNED_STEPS
from tests.stack.processes import PLUGIN, swift
from tests.stack.rounds import LEARNING, train

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("run", ["learned_full", "learned_lora"])
def test_engine_samples_with_the_trained_weights(
    run: str, assets: Path, request: pytest.FixtureRequest
) -> None:
    """Colocated: one rank that trains all weights, two that train LoRA."""
    folder = request.getfixturevalue(run)
    policy.assert_sampled_with_trained_weights(folder, assets / "tiny_vlm", LEARNED_STEPS)
    recorded = json.loads((folder / "run/args.json").read_text(encoding="utf-8"))
    assert recorded["rollout_seed_mode"] == "sample"
    assert recorded["use_cpu"] is True
    assert recorded["encoder_cache_gb"] == 1.0
    assert recorded["ignore_args_error"] is False


def test_tensor_parallel(assets: Path, learning_rows: Path, tmp_path: Path) -> None:
    parallel = ("--vllm_tensor_parallel_size", "2")
    train(assets, learning_rows, tmp_path / "run", *LEARNING, *parallel, ranks=2, steps=2)
    policy.assert_sampled_with_trained_weights(tmp_path / "run", assets / "tiny_vlm", 2)


def test_without_vllm(assets: Path, tmp_path: Path) -> None:
    """The plugin lets ms-swift's transformers engine draw; groups with a bad row are replaced."""
    lines = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    rows = [json.loads(line) for line in lines]
    (tmp_path / "bad.png").write_text("not an image")
    for row in rows[::2]:
        row["images"] = [str(tmp_path / "bad.png")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = [
        *("rlhf", "--rlhf_type", "grpo"),
        *("--external_plugins", PLUGIN, "examples/digits/rewards.py"),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(data)),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--torch_dtype", "float32"),
        *("--check_model", "false", "--use_vllm", "false", "--tuner_type", "full"),
        *("--reward_funcs", "digit_accuracy", "--num_generations", "4", "--max_steps", "3"),
        *("--per_device_train_batch_size", "8", "--max_completion_length", "12"),
        *("--truncation_strategy", "delete", "--max_length", "500"),
        *("--report_to", "none", "--output_dir", str(tmp_path / "run"), "--add_version", "false"),
    ]
    finished = swift(*argv, log=tmp_path / "log")
    assert finished.returncode == 0, finished.cause
    assert (tmp_path / "run/checkpoint-3/model.safetensors").is_file()
    samples = read_samples(tmp_path / "run", columns=["media"])["media"].to_pylist()
    assert len(samples) == 3 * 8
    assert all("bad.png" not in str(media) for media in samples)
    # Each of the three rows stands in an epoch of three steps, and is drawn once.
    assert finished.output.count("takes the place of the whole group") == 3
