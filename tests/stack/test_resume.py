"""A run that was resumed ends with the weights of one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swift_grpo_ext.sampling.groups import parse_request_id
from tests.stack.policy import load_policy
from tests.stack.rounds import train

pytestmark = pytest.mark.stack

LEARNING = ("--learning_rate", "2e-3", "--save_strategy", "steps")
WAYS = {
    "full": (),
    "lora": ("--tuner_type", "lora", "--target_modules", "all-linear"),
}
BEST = ("--eval_strategy", "steps", "--eval_steps", "2", "--load_best_model_at_end", "true")


@pytest.mark.parametrize("way", WAYS)
def test_two_steps_and_two_more_are_four(
    way: str, assets: Path, rows: Path, tmp_path: Path
) -> None:
    """Beside it, the resumed run loads the weights of its best checkpoint at its end."""
    saving = (*LEARNING, *WAYS[way], "--save_steps", "2", "--save_total_limit", "2")
    whole = train(assets, rows, tmp_path / "whole", *saving, steps=4)
    halfway = tmp_path / "whole/run/checkpoint-2"
    best = (*BEST, "--val_dataset", str(rows), "--per_device_eval_batch_size", "12")
    resume = ("--resume_from_checkpoint", str(halfway), *best)
    resumed = train(assets, rows, tmp_path / "resumed", *saving, *resume, steps=4)

    resumed = {name: s for name, s in resumed.items() if parse_request_id(name).phase == "train"}
    late = {name: s["token_ids"] for name, s in whole.items() if parse_request_id(name).step >= 2}
    assert {name: s["token_ids"] for name, s in resumed.items()} == late
    ends = [tmp_path / run / "run/checkpoint-4" for run in ("whole", "resumed")]
    expected, got = (load_policy(end, assets / "tiny_vlm").state_dict() for end in ends)
    start = load_policy(halfway, assets / "tiny_vlm").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6, msg=name)
    moved = max((expected[name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-4, "no weight moved: the test sees nothing"
    log = (tmp_path / "resumed/log").read_text(encoding="utf-8")
    assert ("are loaded, the best" in log) is (way == "full")  # adapters are PEFT's
