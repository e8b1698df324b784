"""Placeholders of media are never sampled, and have no probability in training (M2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from swift_grpo_ext.record.query import read_samples
from tests.rig.policy import SAME
from tests.rig.rounds import BATCH, PRESET, logged_steps, run_training, without_vllm
from tests.rig.spelled import PROMPTS_END, write_speller

IMAGE_PAD = 151655


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first token is `<|image_pad|>` with probability 1; others are equally
    likely."""
    folder = tmp_path_factory.mktemp("placeholder") / "model"
    write_speller(assets / "tiny_vlm", folder, [[PROMPTS_END, IMAGE_PAD]])
    speller = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        speller.get_output_embeddings().weight[IMAGE_PAD] *= 10
    speller.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("use_vllm", [True, False])
def test_a_placeholder_of_probability_1_is_never_sampled(
    use_vllm: bool, model: Path, assets: Path, tmp_path: Path
) -> None:
    preset = PRESET if use_vllm else without_vllm(tmp_path)
    rows, argv = assets / "digits/train.jsonl", ("--model", str(model))
    finished = run_training(assets, rows, tmp_path, *argv, steps=2, preset=preset)
    assert finished.returncode == 0, finished.cause
    completions = read_samples(tmp_path / "run", columns=["token_ids"])["token_ids"].to_pylist()
    assert len(completions) == 2 * BATCH
    assert all(completions)
    assert not any(IMAGE_PAD in token_ids for token_ids in completions)
    if use_vllm:  # both sides compute the softmax over the other tokens
        gaps = [step["rollout_gap/max"] for step in logged_steps(tmp_path / "run")]
        assert len(gaps) == 2
        assert max(gaps) < SAME
