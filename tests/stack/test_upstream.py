"""A run with `--rollout_seed_mode engine` has ms-swift's own losses and gradient norms (R7),
although a group is encoded once, its prompt is read once, and needless passes are left out."""

from __future__ import annotations

from pathlib import Path

from tests.rig.bare import assert_losses_are_ms_swifts


def test_losses_are_ms_swifts(assets: Path, tmp_path: Path) -> None:
    """Two updates of a round, with a reference model."""
    argv = ("--num_iterations", "2", "--beta", "0.04")
    assert_losses_are_ms_swifts(assets, tmp_path, *argv)
