"""A model that would answer with `<|image_pad|>` alone, and one that names no placeholders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from swift_grpo_ext.record.query import read_samples
from tests.rig import rounds
from tests.rig.policy import SAME
from tests.rig.rounds import BATCH, PRESET, logged_steps, run_training, without_vllm
from tests.rig.spelled import PROMPTS_END, write_speller

IMAGE_PAD = 151655


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first token is `<|image_pad|>` with probability 1; others are equally
    likely."""
    folder = write_speller(
        assets / "tiny_vlm",
        tmp_path_factory.mktemp("placeholder") / "model",
        [[PROMPTS_END, IMAGE_PAD]],
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
    preset = PRESET if use_vllm else without_vllm(tmp_path)
    rows, argv = assets / "digits/train.jsonl", ("--model", str(model))
    finished = run_training(assets, rows, tmp_path, *argv, steps=2, preset=preset)
    assert finished.returncode == 0, finished.cause
    completions = read_samples(tmp_path / "run", columns=["token_ids"])["token_ids"].to_pylist()
    assert len(completions) == 2 * BATCH
    assert all(completions)
    assert not any(IMAGE_PAD in token_ids for token_ids in completions)
    if use_vllm:
        # Both sides compute the softmax over the other tokens.
        assert [s["rollout_gap/max"] < SAME for s in logged_steps(tmp_path / "run")] == [True] * 2


def test_a_model_that_names_nothing_trains_as_in_ms_swift(assets: Path, tmp_path: Path) -> None:
    """One warning names what the model lacks."""
    rows = rounds.write_lines(tmp_path / "rows.jsonl", rounds.digits(assets, range(3)))
    plugins = ("tests/rig/nameless.py",)
    finished = rounds.run_training(assets, rows, tmp_path, *rounds.LEARNING, plugins=plugins)
    assert finished.returncode == 0, finished.cause
    warnings = [line for line in finished.output.splitlines() if "WARNING:swift" in line]
    [line] = [line for line in warnings if "placeholder" in line]
    assert "names no output embedding and no placeholder of media" in line
    for step in rounds.logged_steps(tmp_path / "run"):
        assert step["rollout_gap/mean"] < 1e-4
        assert step["grad_norm"] > 0
