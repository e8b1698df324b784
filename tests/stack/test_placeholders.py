"""A model that answers with `<|image_pad|>`, and with nothing else, if it is let."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen2_5_VLForConditionalGeneration

from swift_grpo_ext.record.reader import read_samples
from tests.stack.policy import SAME
from tests.stack.processes import PLUGIN, ROOT, swift
from tests.stack.spelled import write_speller

pytestmark = pytest.mark.stack

IMAGE_PAD = 151655
LAST_OF_PROMPT = 198  # the line break behind `<|im_start|>assistant`


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first token is `<|image_pad|>` with probability 1; no other is likelier than the rest."""
    folder = write_speller(
        assets / "tiny_vlm",
        tmp_path_factory.mktemp("placeholder") / "model",
        [[LAST_OF_PROMPT, IMAGE_PAD]],
    )
    speller = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        speller.get_output_embeddings().weight[IMAGE_PAD] *= 10
    speller.save_pretrained(folder)
    return folder


LORA_TP = {"tuner_type": "lora", "target_modules": ["all-linear"], "vllm_tensor_parallel_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "vLLM": {},
    "LoRA, tensor parallel": LORA_TP,
    "transformers": {"use_vllm": False},
}


@pytest.mark.parametrize(
    "way", ["vLLM", pytest.param("LoRA, tensor parallel", marks=pytest.mark.extra), "transformers"]
)
def test_a_placeholder_of_probability_1_is_never_sampled(
    way: str, model: Path, assets: Path, tmp_path: Path
) -> None:
    preset = yaml.safe_load((ROOT / "examples/digits/grpo.yaml").read_text(encoding="utf-8"))
    if way == "transformers":  # ms-swift refuses what is meant for vLLM
        preset = {name: value for name, value in preset.items() if not name.startswith("vllm_")}
    config = tmp_path / "grpo.yaml"
    config.write_text(yaml.safe_dump({**preset, **WAYS[way]}))
    ranks = WAYS[way].get("vllm_tensor_parallel_size", 1)
    finished = swift(
        *("rlhf", str(config)),
        *("--model", str(model), "--dataset", str(assets / "digits/train.jsonl")),
        *("--external_plugins", PLUGIN, "examples/digits/rewards.py"),
        *("--num_generations", "4", "--max_steps", "2"),
        *("--per_device_train_batch_size", str(12 // ranks)),
        *("--save_strategy", "no", "--output_dir", str(tmp_path / "run"), "--add_version", "false"),
        log=tmp_path / "log",
        env={"NPROC_PER_NODE": str(ranks)} if ranks > 1 else {},
    )
    assert finished.returncode == 0, finished.cause
    rows = read_samples(tmp_path / "run", columns=["token_ids"])["token_ids"].to_pylist()
    assert len(rows) == 2 * 12
    assert all(rows)
    assert not any(IMAGE_PAD in token_ids for token_ids in rows)
    if way != "transformers":
        lines = (tmp_path / "run/logging.jsonl").read_text(encoding="utf-8").splitlines()
        gaps = [e["rollout_gap/max"] for e in map(json.loads, lines) if "rollout_gap/max" in e]
        assert len(gaps) == 2
        assert gaps[0] < SAME  # the softmax is over the other tokens on both sides
