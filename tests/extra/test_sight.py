"""Faults of an engine's sight are named in the round in which they happen, with a server and in
float32 (M5). A healthy policy raises no alarm (R4)."""

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_vlm.families import FAMILIES, make_family

from tests.rig.rounds import digits, read_lines, run_training, write_lines
from tests.rig.seeing import (
    GROUP_SIZE,
    PLUGIN,
    assert_each_fault_is_named_in_its_round,
    faults_of_rounds,
)

HEALTHY_UPDATES = int(os.environ.get("HEALTHY_UPDATES", "12"))
"""`HEALTHY_UPDATES=500 pytest tests/extra/test_sight.py -k healthy` repeats the figures of
docs/internals.md, in some ten minutes for each family and type."""


@pytest.mark.parametrize(
    ("dtype", "served"), [("bfloat16", True), ("float32", False), ("float32", True)]
)
def test_each_fault_is_named_in_its_round(
    dtype: str, served: bool, assets: Path, tmp_path: Path
) -> None:
    assert_each_fault_is_named_in_its_round(assets, tmp_path, dtype, served=served)


def mixed_rows(assets: Path, folder: Path, without: tuple[str, str]) -> list[dict[str, Any]]:
    """Return rows of text, of an image of any size, and of two images, in prompts of any length."""
    made = digits(assets, range(60))
    for number, row in enumerate(made):
        question = row["messages"][0]
        image = Image.open(row["images"][0]).convert("RGB")
        size = (84 + 28 * (number % 4), 56 + 28 * (number % 5 // 2))
        row["images"] = [str(folder / f"{number}.png")]
        image.resize(size).save(row["images"][0])
        question["content"] += " Look twice, and say it in words." * (number % 4)
        if number % 3 == 0:
            question["content"], row["images"] = f"What is {number} + 4? In words.", []
        elif number % 3 == 1:
            question["content"] = f"<image><image>Which digits?{' Look twice.' * (number % 4)}"
            row["images"] = [*row["images"], digits(assets, [number])[0]["images"][0]]
        question["content"] = question["content"].replace(*without)
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "internvl", "gemma3", "qwen3_vl_moe", "qwen3_5", "qwen3_vl"]
)
def test_a_healthy_policy_raises_no_alarm(
    name: str, dtype: str, assets: Path, tmp_path: Path
) -> None:
    """Each round is compared, not the first two alone. The mixture of experts has no R3."""
    if (name, dtype) == ("qwen3_5", "float32"):
        pytest.skip("vLLM's gated delta net has bfloat16 alone on CPUs")
    family = FAMILIES[name]
    make_family(family, tmp_path / "model", seed=0)
    path = write_lines(tmp_path / "rows.jsonl", mixed_rows(assets, tmp_path, family.without))
    own = [
        *("--model", str(tmp_path / "model"), *family.swift_argv, "--torch_dtype", dtype),
        *("--rollout_mismatch", "warn", "--router_replay_mode", "disabled", "--sample_log", "none"),
        *("--num_generations", str(GROUP_SIZE), "--temperature", "1.0", "--learning_rate", "1e-4"),
        *("--beta", "0.02", "--freeze_vit", "false", "--freeze_aligner", "false"),
        *("--max_completion_length", "8", "--ddp_find_unused_parameters", "true"),
    ]
    steps, env = HEALTHY_UPDATES, faults_of_rounds(tmp_path, [""])
    run_training(
        *(assets, path, tmp_path / "training", *own), steps=steps, plugins=[PLUGIN], env=env
    ).check()
    rounds = read_lines(tmp_path / "rounds")
    assert len(rounds) == steps
    assert [number for number, found in enumerate(rounds) if found["named"]] == []
