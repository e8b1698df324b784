"""A model that answers with `<|image_pad|>`, and with nothing else, if it is let."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from swift_grpo_ext.record.reader import read_samples
from tests.stack.policy import SAME
from tests.stack.processes import PLUGIN, swift
from tests.stack.rounds import PRESET, without_vllm
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


@pytest.mark.parametrize("use_vllm", [True, False])
def test_a_placeholder_of_probability_1_is_never_sampled(
    use_vllm: bool, model: Path, assets: Path, tmp_path: Path
) -> None:
    finished = swift(
        *("rlhf", str(PRESET if use_vllm else without_vllm(tmp_path))),
        *("--model", str(model), "--dataset", str(assets / "digits/train.jsonl")),
        *("--external_plugins", PLUGIN, "examples/digits/rewards.py"),
        *("--num_generations", "4", "--max_steps", "2", "--per_device_train_batch_size", "12"),
        *("--save_strategy", "no", "--output_dir", str(tmp_path / "run"), "--add_version", "false"),
        log=tmp_path / "log",
    )
    assert finished.returncode == 0, finished.cause
    rows = read_samples(tmp_path / "run", columns=["token_ids"])["token_ids"].to_pylist()
    assert len(rows) == 2 * 12
    assert all(rows)
    assert not any(IMAGE_PAD in token_ids for token_ids in rows)
    if use_vllm:
        lines = (tmp_path / "run/logging.jsonl").read_text(encoding="utf-8").splitlines()
        gaps = [e["rollout_gap/max"] for e in map(json.loads, lines) if "rollout_gap/max" in e]
        assert len(gaps) == 2
        assert gaps[0] < SAME  # the softmax is over the other tokens on both sides
