"""`--full_determinism true`: settings that would make two runs, or a resumed run, differ are
named."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.checks.rules import check_arguments, rules_of_data
from tests.rig.arguments import command_line_arguments, training_arguments


def asked(**changes: Any) -> Any:
    return command_line_arguments("rlhf", **{"full_determinism": True, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"dataloader_num_workers": 4, "use_liger_kernel": True, "bf16": True}, None),
        ({"rollout_seed_mode": "engine"}, "for a resumed run with --rollout_seed_mode engine"),
        ({"rollout_seed_mode": "engine", "use_vllm": False}, None),
        ({"async_generate": True}, "does not hold for a resumed run with --async_generate true"),
        ({"sync_ref_model": True}, "does not hold for a resumed run with --sync_ref_model true"),
        ({"save_only_model": True}, "no checkpoint holds the optimizer's state. Leave that"),
        ({"save_only_model": True, "full_determinism": False}, None),
    ],
)
def test_settings(changes: dict[str, Any], expected: str | None) -> None:
    found = [f for f in check_arguments(asked(**changes), ()) if "full_determ" in f.setting]
    assert [f.level for f in found] == ["warning"] * (expected is not None)
    assert all(f.sentence.startswith("--full_determinism true: ") for f in found)
    assert all(expected is not None and expected in f.sentence for f in found)


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({}, 0),
        ({"num_iterations": 2}, 2),
        ({"num_iterations": 2, "save_steps": 4}, 0),
        ({"num_iterations": 2, "save_strategy": "epoch"}, 0),
        ({"steps_per_generation": 6}, 3),
        ({"steps_per_generation": 1}, 0),
        ({"num_iterations": 2, "save_steps": 0.5}, 0),
    ],
)
def test_checkpoints_in_the_middle_of_a_round(changes: dict[str, Any], updates: int) -> None:
    """The gradients of two batches make an update."""
    args = asked()
    of_training = {"steps_per_generation": 2, "save_steps": 1, **changes}
    args.training_args = training_arguments(**of_training)
    found = [f.sentence for f in rules_of_data(args, range(9), None) if "full" in f.setting]
    expected = f"one rollout serves {updates} updates, and --save_steps 1 saves between them."
    assert len(found) == bool(updates)
    assert all(expected in f and f"a multiple of {updates}." in f for f in found)
    args.full_determinism = False
    assert [f for f in rules_of_data(args, range(9), None) if "full" in f.setting] == []
