"""Models that spell known tokens. Reward functions and the record get the stop that ended
a completion (T1, T3, T4). Placeholders of media are never sampled, and have no probability in
training (M2)."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from swift_grpo_ext.record.query import read_samples
from tests.rig.policy import SAME
from tests.rig.rounds import BATCH, logged_steps, read_lines, train
from tests.rig.spelled import NEW_TOKEN, PROMPTS_END, SEARCH, token_ids, write_speller

IMAGE_PAD = 151655


def test_a_training_stops_at_a_token_that_does_not_show(
    assets: Path, rows: Path, tmp_path: Path
) -> None:
    """The model's answer to any prompt is ` find it</search>`. No sample counts as truncated."""
    answer = token_ids(SEARCH, AutoTokenizer.from_pretrained(assets / "tiny_vlm"))
    folder = write_speller(assets / "tiny_vlm", tmp_path / "searcher", [[PROMPTS_END, *answer]])
    model = ("--model", str(folder), "--new_special_tokens", NEW_TOKEN)
    stops = ("--stop_token_ids", "1836", "--include_stop_str_in_output", "false", "--top_k", "1")
    argv = (*model, *stops, "--reward_funcs", "stopped")
    train(assets, rows, tmp_path / "a", *argv, steps=2)
    text, ids = " find it</", answer[:4]
    rewarded = read_lines(tmp_path / "a/record/rewards.jsonl")
    assert rewarded == [[text, 1836, ids, False]] * 2 * BATCH
    row = {"text": text, "token_ids": ids, "finish_reason": "stop", "stop_reason": "1836"}
    assert read_samples(tmp_path / "a/run", columns=list(row)).to_pylist() == [row] * 2 * BATCH


def test_a_placeholder_of_probability_1_is_never_sampled(assets: Path, tmp_path: Path) -> None:
    """The model's first token is `<|image_pad|>` with probability 1; others are equally likely."""
    model = write_speller(assets / "tiny_vlm", tmp_path / "model", [[PROMPTS_END, IMAGE_PAD]])
    speller = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        speller.get_output_embeddings().weight[IMAGE_PAD] *= 10
    speller.save_pretrained(model)
    rows, argv = assets / "digits/train.jsonl", ("--model", str(model))
    train(assets, rows, tmp_path, *argv, steps=2)
    completions = read_samples(tmp_path / "run", columns=["token_ids"])["token_ids"].to_pylist()
    assert len(completions) == 2 * BATCH
    assert all(completions)
    assert not any(IMAGE_PAD in token_ids for token_ids in completions)
    # Both sides compute the softmax over the other tokens.
    gaps = [step["rollout_gap/max"] for step in logged_steps(tmp_path / "run")]
    assert len(gaps) == 2
    assert max(gaps) < SAME
