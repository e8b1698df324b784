"""A run with `--rollout_seed_mode engine` has ms-swift's own losses and gradient norms (R7), with
each kind of loss."""

from pathlib import Path

import pytest

from tests.rig.bare import assert_losses_are_ms_swifts

CASES = {
    "in reward": "--beta 0.04 --kl_in_reward true",
    # ms-swift divides this loss by the tokens of all micro-batches and ranks of a step (4.6,
    # grpo_trainer.py, `WINDOW_NORMALIZED_LOSS_TYPES`). At temperature 2 the lengths are unequal.
    "windowed": "--loss_type cispo --epsilon_high 0.28 --temperature 2.0 "
    "--gradient_accumulation_steps 2 --ddp_backend gloo",
    "two steps": "--steps_per_generation 2",
    "sequence": "--importance_sampling_level sequence",
    "sapo": "--loss_type sapo",
    "gdpo": "--scale_rewards gdpo",
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_ms_swifts(name: str, assets: Path, tmp_path: Path) -> None:
    # ms-swift divides advantages by the standard deviation plus 1e-4. If a group's rewards differ
    # in the last bit alone (2^-24, of a KL term), its advantages are 6e-4.
    assert_losses_are_ms_swifts(
        *(assets, tmp_path, *CASES[name].split()),
        ranks=2 if name == "windowed" else 1,
        rounding=2**-24 / 1e-4 if name == "in reward" else 2e-6,
    )
