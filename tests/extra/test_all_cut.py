"""A training goes on where all completions are cut and it has nothing to learn from (R1)."""

from __future__ import annotations

from pathlib import Path

from tests.rig.rounds import LORA, logged_steps, train


def test_all_completions_are_cut(assets: Path, rows: Path, tmp_path: Path) -> None:
    argv = ("--overlong_filter", "true", "--max_completion_length", "1", "--learning_rate", "1e-3")
    train(assets, rows, tmp_path, *argv, *LORA, steps=2)
    steps = logged_steps(tmp_path / "run")
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(0, 0)] * 2
