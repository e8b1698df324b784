"""A run that was resumed ends with the weights of one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swift_grpo_ext.sampling.seeding import SampleId
from tests.stack.conftest import LEARNED_STEPS
from tests.stack.policy import load_policy
from tests.stack.rounds import LEARNING, LORA, recorded, train

pytestmark = pytest.mark.stack

WAYS = {"full": (1, ()), "lora": (2, LORA)}
"""Ranks and arguments."""

BEST = ("--eval_strategy", "steps", "--eval_steps", "2", "--load_best_model_at_end", "true")


@pytest.mark.parametrize("way", ["full", pytest.param("lora", marks=pytest.mark.extra)])
def test_two_steps_and_two_more_are_four(
    way: str, assets: Path, learning_rows: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Beside it, the resumed run loads the weights of its best checkpoint at its end."""
    ranks, argv = WAYS[way]
    folder = request.getfixturevalue(f"learned_{way}")
    halfway = folder / "run/checkpoint-2"
    batch = ("--per_device_eval_batch_size", str(12 // ranks))
    best = (*BEST, "--val_dataset", str(learning_rows), *batch)
    more = (*LEARNING, *argv, "--save_steps", "2", *best, "--resume_from_checkpoint", str(halfway))
    resumed = train(assets, learning_rows, tmp_path, *more, ranks=ranks, steps=LEARNED_STEPS)

    resumed = {name: s for name, s in resumed.items() if SampleId.parse(name).phase == "train"}
    whole = recorded(folder)
    late = {name: s["token_ids"] for name, s in whole.items() if SampleId.parse(name).step >= 2}
    assert {name: s["token_ids"] for name, s in resumed.items()} == late
    ends = [of_run / "run/checkpoint-4" for of_run in (folder, tmp_path)]
    expected, got = (load_policy(end, assets / "tiny_vlm").state_dict() for end in ends)
    start = load_policy(halfway, assets / "tiny_vlm").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6, msg=name)
    moved = max((expected[name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-4, "no weight moved: the test sees nothing"
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert ("are loaded, the best" in log) is (way == "full")  # adapters are PEFT's
