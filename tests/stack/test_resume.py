"""A run that was resumed ends with the weights of one that was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swift_grpo_ext.groups import place_of
from tests.stack.policy import load_policy
from tests.stack.rounds import train

pytestmark = pytest.mark.stack

LEARNING = ("--learning_rate", "2e-3", "--save_strategy", "steps")
WAYS = {
    "full": (),
    "lora": ("--tuner_type", "lora", "--target_modules", "all-linear"),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_steps_and_two_more_are_four(
    way: str, assets: Path, rows: Path, tmp_path: Path
) -> None:
    saving = (*LEARNING, *WAYS[way], "--save_steps", "2", "--save_total_limit", "2")
    whole = train(assets, rows, tmp_path / "whole", *saving, steps=4)
    halfway = tmp_path / "whole/run/checkpoint-2"
    resume = ("--resume_from_checkpoint", str(halfway))
    resumed = train(assets, rows, tmp_path / "resumed", *saving, *resume, steps=4)

    late = {name: s["token_ids"] for name, s in whole.items() if place_of(name).step >= 2}
    assert {name: s["token_ids"] for name, s in resumed.items()} == late
    ends = [tmp_path / run / "run/checkpoint-4" for run in ("whole", "resumed")]
    expected, got = (load_policy(end, assets / "tiny_vlm").state_dict() for end in ends)
    start = load_policy(halfway, assets / "tiny_vlm").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6, msg=name)
    moved = max((expected[name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-4, "no weight moved: the test sees nothing"


def test_the_best_checkpoint_is_loaded_at_the_end(assets: Path, rows: Path, tmp_path: Path) -> None:
    """`--load_best_model_at_end`: what is saved last are the weights of the best checkpoint."""
    argv = [
        *(*LEARNING, "--save_steps", "1", "--save_total_limit", "3"),
        *("--val_dataset", str(rows), "--eval_strategy", "steps", "--eval_steps", "1"),
        *("--per_device_eval_batch_size", "12", "--load_best_model_at_end", "true"),
        *("--metric_for_best_model", "reward", "--greater_is_better", "false"),
    ]
    train(assets, rows, tmp_path, *argv, steps=2)
    lines = (tmp_path / "run/logging.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["best_model_checkpoint"]
    assert "are loaded, the best" in (tmp_path / "log").read_text(encoding="utf-8")
