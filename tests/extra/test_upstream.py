"""A run with `--rollout_seed_mode engine` has ms-swift's own losses and gradient norms (R7), with
each kind of loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.bare import assert_losses_are_ms_swifts

IN_REWARD = "--beta 0.04 --kl_in_reward true"
WINDOWED = (
    "--loss_type cispo --epsilon_high 0.28 --temperature 2.0 --gradient_accumulation_steps 2 "
    "--ddp_backend gloo"
)
"""ms-swift divides this loss by the tokens of all micro-batches and ranks of a step (4.6,
grpo_trainer.py, `WINDOW_NORMALIZED_LOSS_TYPES`). At temperature 2 the lengths are unequal."""


@pytest.mark.parametrize(
    "argv",
    [
        *("", IN_REWARD, WINDOWED, "--steps_per_generation 2"),
        *("--importance_sampling_level sequence", "--loss_type sapo", "--scale_rewards gdpo"),
    ],
)
def test_losses_are_ms_swifts(argv: str, assets: Path, tmp_path: Path) -> None:
    # ms-swift divides advantages by the standard deviation plus 1e-4. If a group's rewards differ
    # in the last bit alone (2^-24, of a KL term), its advantages are 6e-4.
    assert_losses_are_ms_swifts(
        *(assets, tmp_path, *argv.split()),
        ranks=2 if argv == WINDOWED else 1,
        rounding=2**-24 / 1e-4 if argv == IN_REWARD else 2e-6,
    )
