"""Trainings that read a group's prompt once equal plain ones but for rounding, in models with gated
delta nets or windows. `tests/logits` compares passes; `test_seeds.py` trains a model with full
attention."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_vlm.families import FAMILIES, make_family

from tests.rig import rounds

ALL = (
    *("--torch_dtype", "float32", "--beta", "0.04", "--num_iterations", "2"),
    *("--gradient_checkpointing", "true"),
    *("--learning_rate", "1e-3", *rounds.LORA, "--use_dora", "true"),
)
"""Old-policy and reference passes, several updates, recomputation and DoRA."""


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_trainings_are_equal(name: str, assets: Path, tmp_path: Path) -> None:
    family, model = FAMILIES[name], tmp_path / "model"
    make_family(family, model, seed=0)
    preset, rows = rounds.without_vllm(tmp_path), assets / "digits/train.jsonl"
    argv = ("--model", str(model), *family.swift_argv, *family.lora, *ALL)
    ways = {"plain": ("--logps_shared_prompt", "false"), "once": ()}
    logged = {}
    for way, more in ways.items():
        folder = tmp_path / way
        finished = rounds.run_training(assets, rows, folder, *argv, *more, preset=preset)
        assert finished.returncode == 0, finished.cause
        logged[way] = rounds.logged_steps(folder / "run")
        found = re.search(r"read (\d+) positions instead of (\d+)", finished.output)
        assert (found is None) == (way == "plain")
        assert found is None or int(found[1]) < 0.9 * int(found[2])
    for ours, theirs in zip(logged["once"], logged["plain"], strict=True):
        for key in ("loss", "grad_norm", "kl"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
